# SPDX-License-Identifier: Apache-2.0
"""TensorFlow as it is made for GPUs, on the simulated one: horovod.tensorflow is right under
schedules that are against whoever forgets to wait. `make test-gpu-tensorflow` runs it.

HVD_BUILD names the build, HVD_GPU_RANKS the numbers of ranks.
"""
import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))
from ranks import run_ranks  # noqa: E402

BUILD = pathlib.Path(os.environ["HVD_BUILD"])
RANKS = [int(n) for n in os.environ.get("HVD_GPU_RANKS", "2").split()]
# What TensorFlow looks for by name before it believes in a GPU.
LIBRARIES = """
libcuda.so.1 libnvidia-ml.so.1 libcudart.so.12 libcublas.so.12 libcublasLt.so.12 libcufft.so.11
libcusolver.so.11 libcusparse.so.12 libcudnn.so.9 libnccl.so.2 libcupti.so.12
""".split()


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """A folder in which all of CUDA is the simulation, for TensorFlow, which loads it by name."""
    folder = tmp_path_factory.mktemp("cuda")
    for name in LIBRARIES:
        (folder / name).symlink_to(BUILD / "tests" / "gpu" / "libgpusim12.so")
    return {"PYTHONPATH": os.pathsep.join([str(BUILD / "python"), str(HERE)]),
            "LD_LIBRARY_PATH": str(folder), "TF_CPP_MIN_LOG_LEVEL": "2", "GPUSIM_DEVICES": "3",
            "GPUSIM_DELAY_US": "20000"}  # longer than TensorFlow itself takes


@pytest.mark.parametrize("encrypt", ["auto", "always"])  # by NCCL, and through the host
@pytest.mark.parametrize("schedule", ["random", "lazy", "user-lazy"])
@pytest.mark.parametrize("size", RANKS)
def test_horovod_is_right(environment, schedule, size, encrypt):
    ended = run_ranks(size, "../gpu/tensorflow_suite", "run",
                      env={**environment, "GPUSIM_SCHEDULE": schedule,
                           "HOROVOD_ENCRYPT": encrypt})
    assert ended[0] > 0 and ended == [ended[0]] * size
