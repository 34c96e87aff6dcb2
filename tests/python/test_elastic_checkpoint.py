# SPDX-License-Identifier: Apache-2.0
"""An elastic job whose ranks are all lost goes on from its checkpoint, and others like it."""
import os
import re
import subprocess
import sys

from horovod.runner.launch import find_launcher

TRAIN = """
import os, sys
import torch
import horovod.torch as hvd

folder, last = sys.argv[1], int(sys.argv[2])
hvd.init()
torch.manual_seed(hvd.rank() if last == 9 else 50)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                                     named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(list(range(1000)), seed=3)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, step=0, note="a")


@hvd.elastic.run(checkpoint=folder)
def train(state):
    print("begins at", state.step, state.note, sampler.processed_num, flush=True)
    while state.step < last:
        optimizer.zero_grad()
        model(torch.full((1, 2), 1.0 + state.step)).sum().backward()
        optimizer.step()
        sampler.record_batch(0, 2)
        state.step, state.note = state.step + 1, f"after {state.step}"
        print("at", state.step, [p.tolist() for p in model.parameters()], flush=True)
        state.commit(path=folder, keep=2)
    hvd.barrier()
    if last == 9:
        from horovod.checkpoint import saving
        saving._current.wait()
        hvd.barrier()
        os._exit(3)  # all at once: nobody has the state any more


train(state)
print("ends with", [p.tolist() for p in model.parameters()], flush=True)
"""


def run(folder, last, n_ranks, *words):
    (folder / "train.py").write_text(TRAIN)
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("HOROVOD")}
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    return subprocess.run([find_launcher(), "-np", str(n_ranks), *words, sys.executable,
                           folder / "train.py", folder / "checkpoints", str(last)],
                          env=environment, timeout=500, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True)


def test_job_that_is_started_again(tmp_path):
    lost = run(tmp_path, 9, 2, "--min-np", "1")
    assert lost.returncode != 0 and "begins at 0 a 0" in lost.stdout, lost.stderr
    at_nine = re.search(r"at 9 (\[.*)", lost.stdout)[1]
    again = run(tmp_path, 12, 1, "--min-np", "1")
    assert again.returncode == 0, again.stderr
    assert "begins at 9 after 8 36" in again.stdout, again.stdout
    assert at_nine not in again.stdout and "ends with" in again.stdout
    again = run(tmp_path, 12, 2)  # also without the launcher's elasticity; there is nothing to do
    assert again.returncode == 0 and again.stdout.count("begins at 12 after 11 42") == 2, \
        again.stdout + again.stderr
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
