# SPDX-License-Identifier: Apache-2.0
"""horovod.torch: every row is a job of real ranks."""
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch.distributed as dist

from horovod import _core
from listings import before_and_after, losses, run_script, whole_scripts
from ranks import run_ranks

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TCP = {"HOROVOD_TRANSPORTS": "tcp"}


def run_under_horovodrun(size, script, *arguments, timeout_s=600):
    """What the script says on stdout; it must succeed on every rank."""
    horovodrun = pathlib.Path(_core.__file__).parents[2] / "horovodrun"
    done = subprocess.run([horovodrun, "-np", str(size), sys.executable, HERE / script,
                           *arguments], capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


OPS = [  # process set, ranks, hosts, environment
    ("world", 1, 1, {}),
    ("world", 2, 2, {}),
    ("world", 3, 1, {}),
    ("set", 3, 1, TCP),
]


@pytest.mark.parametrize("which,size,hosts,env", OPS)
def test_operations(which, size, hosts, env):
    assert run_ranks(size, "torch/ops_suite", "run", which, hosts=hosts, env=env) == [True] * size


def test_operations_under_horovodrun():
    run_under_horovodrun(2, "ops_suite.py", "world")


@pytest.mark.parametrize("size", [2, 3])
def test_training(size):
    assert run_ranks(size, "torch/training_suite", "run") == [True] * size


@pytest.mark.parametrize("started_by", ["launcher", "torch"])
def test_torch_distributed(started_by, tmp_path):
    env = {"TEST_STORE": str(tmp_path / "store")}
    assert run_ranks(2, "torch/c10d_suite", "run", started_by, env=env) == [True, True]


def test_torch_distributed_groups():
    assert run_ranks(4, "torch/c10d_suite", "groups", hosts=2) == [True] * 4


@pytest.mark.skipif(not hasattr(dist.Work, "boxed"), reason="a group has one backend there")
def test_torch_distributed_beside_another_backend():
    assert run_ranks(2, "torch/c10d_suite", "beside_gloo") == ["hvd"] * 2


def test_torch_distributed_when_a_rank_leaves():
    told, _ = run_ranks(2, "torch/c10d_suite", "leave", codes=[0, 1])
    assert len(told) == 4 and all("Rank 1" in text for text in told), told


def test_torch_distributed_ends_its_thread():
    assert run_ranks(1, "torch/c10d_exit", "run") == [True]


EXAMPLES = [  # file, arguments, what its output must have
    ("pytorch_mnist.py", ["--epochs", "1", "--limit", "6000"], "images/s on 2 ranks"),
    ("pytorch_synthetic_benchmark.py", ["--num-iters", "1", "--num-batches-per-iter", "1"],
     "on 2 ranks"),
    ("pytorch_ddp_backend.py", [], "weights are equal on all ranks: True"),
    ("pytorch/pytorch_transformer_amp.py", ["--steps", "40"], "step 39 loss"),
    ("pytorch/pytorch_elastic.py", [], "epoch 2 on 2 ranks"),
    ("pytorch/pytorch_adasum.py", [], "adasum loss"),
    ("pytorch/pytorch_process_sets.py", [], "epoch 2 widths 4 and 32"),
]


@pytest.mark.parametrize("name,arguments,expected", EXAMPLES)
def test_examples_under_horovodrun(name, arguments, expected):
    output = run_under_horovodrun(2, ROOT / "examples" / name, *arguments)
    assert expected in output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert not losses or losses[-1] < losses[0]


def test_the_imagenet_example_continues_from_its_checkpoint(tmp_path):
    example = ROOT / "examples/pytorch/pytorch_imagenet_resnet.py"
    found = []
    for epochs in ("1", "2"):
        output = run_under_horovodrun(2, example, "--checkpoints", tmp_path, "--pictures", "256",
                                      "--epochs", epochs)
        found += [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert "continues after epoch 1" in output
    assert len(found) == 2 and found[1] < found[0], found


def learns(output):
    found = losses(output)
    assert len(found) == 3 and found[-1] < found[0] / 2, output


def test_the_script_of_the_front_page(tmp_path):
    """Before and after; the checkpoint of the job is that of rank 0."""
    for ranks, script in zip((0, 2), before_and_after("README.md")):
        learns(run_script(script, tmp_path, ranks=ranks))
        (tmp_path / "model.pt").unlink()


def test_the_script_of_the_page_continues_from_its_checkpoint(tmp_path):
    script, = whole_scripts("docs/pytorch.md")
    learns(run_script(script, tmp_path))
    output = run_script(script, tmp_path)
    assert "epoch 5" in output and "epoch 2" not in output, output


def test_the_script_of_ddp_on_this_backend(tmp_path):
    script, = whole_scripts("docs/from-ddp.md")
    found = losses(run_script(script, tmp_path))
    assert len(found) == 20 and found[-1] < found[0] / 2, found


def test_the_script_with_checkpoints(tmp_path):
    script, = whole_scripts("docs/checkpoints.md")
    learns(run_script(script, tmp_path))
    shutil.rmtree(max((tmp_path / "checkpoints").iterdir()))
    output = run_script(script, tmp_path, ranks=1)  # goes on with what is left
    assert "epoch 2" in output and "epoch 1" not in output, output


def test_the_elastic_script(tmp_path):
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    script, = whole_scripts("docs/elastic.md")
    learns(run_script(script, tmp_path, "--min-np", "1", "--host-discovery-script", hosts))
