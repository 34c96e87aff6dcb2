# SPDX-License-Identifier: Apache-2.0
"""PyTorch on the simulated GPU: its own NCCL backend as judge of the simulation, then
horovod.torch, under schedules that are against whoever forgets to wait.

HVD_BUILD names the build, GPUSIM_CUDA the major version of CUDA that this PyTorch was made for,
HVD_GPU_RANKS the numbers of ranks.
"""
import json
import os
import pathlib
import statistics
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))
from ranks import run_ranks  # noqa: E402

BUILD = pathlib.Path(os.environ["HVD_BUILD"])
CUDA = os.environ.get("GPUSIM_CUDA", "13")
RANKS = [int(n) for n in os.environ.get("HVD_GPU_RANKS", "2").split()]
SCHEDULES = ["random", "lazy", "user-lazy"]
SOME_SCHEDULES = SCHEDULES if len(RANKS) > 1 else ["lazy"]  # `make test` has no time for all
TIMEOUT_S = 240
LONGEST_STEP_S = 0.05  # the core looks after signals, and for the end, twice as seldom


@pytest.fixture(scope="session")
def overlay():
    folder = BUILD / "tests" / "gpu" / f"overlay-{pathlib.Path(sys.prefix).name}"
    library = BUILD / "tests" / "gpu" / f"libgpusim{CUDA}.so"
    subprocess.run([sys.executable, HERE.parent.parent / "tools" / "overlay-torch.py", folder,
                    library], check=True)
    return folder


def environment(overlay, schedule, **more):
    return {"PYTHONPATH": os.pathsep.join([str(overlay), str(BUILD / "python"), str(HERE)]),
            "LD_LIBRARY_PATH": str(overlay / "torch" / "lib"), "OMP_NUM_THREADS": "1",
            "GPUSIM_SCHEDULE": schedule, "GPUSIM_DEVICES": "3",
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1", **more}


def trained_alone(size):
    """The weights that ranks must get who share the batches: those of one process that has all."""
    code = (f"import sys; sys.path.insert(0, {str(HERE)!r}); import sys, types, json;"
            "sys.modules['fallback'] = types.ModuleType('fallback');"
            "import torch, judge; torch.manual_seed(1);"
            "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(),"
            "                            torch.nn.Linear(8, 1));"
            f"torch.manual_seed(7); x = torch.randn({8 * size}, 4); y = torch.randn({8 * size}, 1);"
            "torch.randn = lambda n, m: x if m == 4 else y;"
            "print(json.dumps(judge.train(model, 0, 1, 'cpu')))")
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, text=True,
                                     capture_output=True).stdout)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pytorchs_own_backend_is_right(overlay, schedule, tmp_path):
    size = 2
    ranks = [subprocess.Popen([sys.executable, HERE / "judge.py", str(rank), str(size),
                               tmp_path / "store"], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, **environment(overlay, schedule)})
             for rank in range(size)]
    told = [json.loads(rank.communicate(timeout=TIMEOUT_S)[0]) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    assert all(one["device"].startswith("Simulated GPU") for one in told)
    assert [one["wrong"] for one in told] == [0] * size
    assert all(one["weights"] == pytest.approx(trained_alone(size), abs=1e-5) for one in told)
    if schedule != "user-lazy":  # there the backend's own streams do not dawdle
        assert all(one["early"] > 0 for one in told), "a read without a wait was never wrong"


def test_what_is_found_is_told(overlay):
    code = ("import horovod.torch as hvd; assert hvd.cuda_built() and not hvd.rocm_built();"
            "assert hvd.nccl_built() == 23007, hvd.nccl_built()")
    library = BUILD / "tests" / "gpu" / "lib"
    subprocess.run([sys.executable, "-c", code], check=True,
                   env={**os.environ, **environment(overlay, "eager"),
                        "LD_LIBRARY_PATH": f"{overlay / 'torch' / 'lib'}:{library}"})
    told = subprocess.run([BUILD / "hvd-info"], check=True, text=True, capture_output=True,
                          env={**os.environ, "LD_LIBRARY_PATH": str(library)}).stdout
    assert "2.30.7" in told and "CUDA" in told


def test_nothing_waits_for_the_device(overlay):
    """No step could end otherwise; and none is waited for a while, and then no more."""
    for took in run_ranks(2, "../gpu/device_suite", "run_beside_closed_gate",
                          env=environment(overlay, "eager")):
        assert statistics.median(took) < LONGEST_STEP_S, took


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", RANKS)
def test_horovod_is_right(overlay, schedule, size):
    weights = run_ranks(size, "../gpu/device_suite", "run", env=environment(overlay, schedule))
    assert all(one == weights[0] for one in weights)


@pytest.mark.parametrize("operations", ["auto", "HOST"] if len(RANKS) > 1 else ["auto"])
@pytest.mark.parametrize("schedule", SOME_SCHEDULES)
@pytest.mark.parametrize("size", RANKS)
def test_backend_of_torch_distributed_is_right(overlay, schedule, size, operations):
    env = environment(overlay, schedule, HOROVOD_GPU_OPERATIONS=operations)
    assert run_ranks(size, "../gpu/c10d_device", "run", env=env) == [True] * size
