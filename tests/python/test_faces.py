# SPDX-License-Identifier: Apache-2.0
"""What importing the packages gives: every public name, and nobody else's code changed."""
import json
import os
import pathlib
import pkgutil
import subprocess
import sys

import horovod
from horovod.common import basics, process_sets

HERE = pathlib.Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
FRAMEWORKS = ["horovod.torch", "horovod.tensorflow", "horovod.keras", "horovod.tensorflow.keras"]
# Added where nothing was: a documented method of datasets, and what register_backend() makes.
ADDED = {"send_to_data_service", "HVD"}


def found_by(*arguments):
    done = subprocess.run([sys.executable, str(HERE / "faces.py"), *arguments], env=ENVIRONMENT,
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line[len("FOUND "):])


def promised():
    """{module: names}"""
    names, module = {}, None
    for line in (HERE / "public_names.txt").read_text().splitlines():
        if line and not line.startswith(("#", " ")):
            module, _, line = line.partition(": ")
            names[module] = set()
        if module is not None:
            names[module].update(line.split())
    return names


def modules():
    """Every module of the package that can be imported here, but programs."""
    skipped = ("libhvd_tf", "horovod.spark.common.", "horovod.spark.keras", "horovod.spark.torch",
               "horovod.spark.lightning") if not _has("pyspark") else ("libhvd_tf",)
    skipped += ("horovod.ray", "horovod.mxnet")  # they only say what takes their place
    return [found.name for found in pkgutil.walk_packages(horovod.__path__, "horovod.")
            if not any(word in found.name for word in skipped)]


def _has(module):
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True,
                          check=False).returncode == 0


def test_no_public_name_vanishes():
    expected = promised()
    found = found_by("names", *expected)
    gone = {module: sorted(names - set(found[module])) for module, names in expected.items()}
    assert {module: names for module, names in gone.items() if names} == {}
    for module in FRAMEWORKS:  # one list for all of them
        assert {*basics.__all__, *process_sets.__all__} <= set(found[module]), module


def test_importing_changes_nobody_elses_code():
    changed = found_by("foreign", *modules())
    assert [place for place in changed if place.rpartition(".")[2] not in ADDED] == []


def test_the_changes_would_be_seen(tmp_path):
    """faces.py looks where it matters."""
    (tmp_path / "guilty.py").write_text(
        "import keras\nimport torch.distributed as dist\n"
        "dist.Work.wait = lambda work: True\nkeras.Model.compile = lambda model: None\n")
    ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path)])
    changed = found_by("foreign", "guilty")
    for place in ("Work.wait", "compile"):
        assert any(one.endswith(place) for one in changed), (place, changed)


BORROWED = """
import keras
import horovod.keras as hvd

def methods():
    optimizer = keras.optimizers.Optimizer
    return [keras.Model.compile, keras.Model.make_train_function, optimizer.__init__,
            keras.mixed_precision.LossScaleOptimizer.__init__, hasattr(optimizer, "lr")]

untouched = methods()
for _ in range(2):  # as elastic jobs do
    hvd.init()
    assert all(now != before for now, before in zip(methods(), untouched))
    hvd.shutdown()
    assert methods() == untouched
hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
assert keras.Model.compile is not untouched[0]
"""


def test_keras_is_as_it_was_after_shutdown():
    done = subprocess.run([sys.executable, "-c", BORROWED], env=ENVIRONMENT, capture_output=True,
                          text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
