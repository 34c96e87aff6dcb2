# SPDX-License-Identifier: Apache-2.0
"""Ranks that die at random moments between commits: no more than the step in flight is lost.

The script is one of the original: it commits now and then, and says nothing else. Its ranks print
what they train on, and the weights before and after. From that the job is replayed in one process:
the steps that count must lead from the first weights to the last, with the members each had.
"""
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from horovod.runner.launch import find_launcher

SEED = int(os.environ.get("HVD_TEST_SEED", "1"))
N_JOBS = int(os.environ.get("HVD_TEST_JOBS", "3"))
N_STEPS = 40
RATE = 0.01
# Where in a step: before it, before the second of its gradients is there, before and after the
# weights have changed, and after the script has noted that.
PLACES = ("begin", "gradient", "apply", "applied", "noted")

TRAIN = """
import os, sys
import torch
import horovod.torch as hvd

FOLDER, N_STEPS, RATE = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
RUN = hvd.elastic.run(on_failure=sys.argv[4]) if len(sys.argv) > 4 else hvd.elastic.run
hvd.init()
torch.manual_seed(7)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, momentum=None),
                            torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


def maybe_die(place):
    try:
        os.unlink(f"{FOLDER}/die.{state.step}.{place}.{hvd.rank()}")
    except FileNotFoundError:
        return
    os._exit(9)


model[0].weight.register_hook(lambda grad: maybe_die("gradient"))
optimizer.register_step_pre_hook(lambda *_: maybe_die("apply"))


def weights():
    return [p.flatten().tolist() for p in model.parameters()]


@RUN
def train(state):
    while state.step < N_STEPS:
        maybe_die("begin")
        me, began = hvd.rank(), hvd.size()
        generator = torch.Generator().manual_seed(1000 * state.step + hvd.rank())
        x = torch.randn(4, 3, generator=generator)
        before = weights()
        n_seen = model[1].num_batches_tracked.item()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        maybe_die("applied")
        print("did", [state.step, me, hvd.size(), n_seen, before, weights(), began], flush=True)
        state.step += 1
        maybe_die("noted")
        if state.step % 17 == 0:
            state.commit()


train(state)
everyone = hvd.allgather_object([weights(), state.step])
assert all(one == everyone[0] for one in everyone), everyone
print("done", [hvd.size(), weights()], flush=True)
"""


def run_job(folder, n_ranks, kills, *words, how=()):
    for step, place, rank in kills:
        (folder / f"die.{step}.{place}.{rank}").touch()
    (folder / "train.py").write_text(TRAIN)
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("HOROVOD")}
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run(
        [find_launcher(), "-np", str(n_ranks), "--min-np", "1", *words, sys.executable,
         folder / "train.py", folder, str(N_STEPS), str(RATE), *how], env=environment, timeout=500,
        stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-5000:]
    assert not list(folder.glob("die.*")), said[-5000:]
    rows = [json.loads(row) for row in re.findall(r"did (\[.*\])", done.stdout)]
    ends = [json.loads(row) for row in re.findall(r"done (\[.*\])", done.stdout)]
    return rows, ends, said


def gradients_of(weights, step, rank):
    """Of the script's model, by PyTorch alone."""
    import torch

    w1, b1, scale, shift, w2, b2 = [torch.tensor(w, dtype=torch.float64) for w in weights]
    parameters = [w1.reshape(2, 3), b1, scale, shift, w2.reshape(1, 2), b2]
    for parameter in parameters:
        parameter.requires_grad_(True)
    w1, b1, scale, shift, w2, b2 = parameters
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    hidden = torch.nn.functional.batch_norm(x @ w1.T + b1, None, None, scale, shift, True)
    (hidden @ w2.T + b2).square().sum().backward()
    return [parameter.grad.flatten().numpy() for parameter in parameters]


def replay(rows, last):
    """The numbers of the steps that lead to the last weights, in order; how many were in vain."""
    steps = []
    by_end = {}
    for row in rows:
        by_end.setdefault(json.dumps(row[5]), []).append(row)
    weights = last
    while json.dumps(weights) in by_end:
        members = by_end[json.dumps(weights)]
        step, _, size, n_seen, before, after, _ = members[0]
        assert all([m[0], m[2], m[4]] == [step, size, before] for m in members)
        assert n_seen == step  # of the forward pass of a failed step nothing is left
        # Who finished it without a lost one has the data of the rank it was.
        ranks = [m[1] for m in members] if len(members) == size else range(size)
        gradients = [gradients_of(before, step, rank) for rank in ranks]
        for old, new, *own in zip(before, after, *gradients):
            assert np.allclose(np.array(old) - RATE * sum(own) / size, new, atol=1e-12), step
        steps.append(step)
        weights = before
    return steps[::-1], len(by_end) - len(steps)


@pytest.mark.parametrize("job", range(N_JOBS))
def test_no_more_than_the_step_in_flight(tmp_path, job):
    rng = random.Random(1000 * SEED + job)
    n_ranks = rng.randrange(2, 7) if N_JOBS > 3 else (3, 2, 4)[job]
    # Each rank that dies takes its place in the line with it: only ranks there are left may die.
    steps = sorted(rng.sample(range(2, N_STEPS - 1), n_ranks - 1))
    kills = [(step, rng.choice(PLACES), rng.randrange(n_ranks - i))
             for i, step in enumerate(steps)]
    rows, ends, said = run_job(tmp_path, n_ranks, kills, "--elastic-restarts", "0", "-H",
                               ",".join(f"127.0.0.{i + 1}:1" for i in range(n_ranks)))
    assert ends, said[-5000:]
    done, n_lost = replay(rows, ends[0][1])
    assert n_lost <= len(kills), (kills, done, n_lost)
    # A step may be done once more, if its end was seen by some before the script could note it.
    assert sorted(set(done)) == list(range(N_STEPS)), (kills, done)
    assert len(done) <= N_STEPS + len(kills), (kills, done)
    assert done == sorted(done), (kills, done)


def test_lost_rank_comes_back(tmp_path):
    """On one host another takes its place, with the state of the others."""
    rows, ends, said = run_job(tmp_path, 2, [(21, "gradient", 0)])
    assert [size for size, _ in ends] == [2, 2], said[-5000:]
    done, n_lost = replay(rows, ends[0][1])
    assert done == list(range(N_STEPS)) and n_lost <= 1, (done, n_lost)


def test_step_is_finished_by_those_left(tmp_path):
    """Nobody does it again, and nobody waits for the rank that is started in place of the lost."""
    kills = [(15, "gradient", 1), (27, "begin", 0)]
    rows, ends, said = run_job(tmp_path, 3, kills, "--elastic-restarts", "0", "-H",
                               "127.0.0.1:1,127.0.0.2:1,127.0.0.3:1", how=["shrink"])
    done, n_lost = replay(rows, ends[0][1])
    assert done == list(range(N_STEPS)) and n_lost == 0, (done, n_lost)
    finished = {row[0]: (row[6], row[2]) for row in rows if row[6] != row[2]}
    assert finished == {15: (3, 2), 27: (2, 1)}, finished


def test_random_moments_where_steps_are_finished(tmp_path):
    rng = random.Random(77000 + SEED)
    kills = [(step, rng.choice(PLACES), rng.randrange(4 - i))
             for i, step in enumerate(sorted(rng.sample(range(2, N_STEPS - 1), 3)))]
    rows, ends, said = run_job(tmp_path, 4, kills, "--elastic-restarts", "0", "-H",
                               ",".join(f"127.0.0.{i + 1}:1" for i in range(4)), how=["shrink"])
    done, n_lost = replay(rows, ends[0][1])
    assert n_lost <= len(kills), (kills, done, n_lost)
    assert sorted(set(done)) == list(range(N_STEPS)) and done == sorted(done), (kills, done)
    assert len(done) <= N_STEPS + len(kills), (kills, done)


def test_lost_rank_joins_later(tmp_path):
    """It is started while the other goes on without waiting for it; then they are two again."""
    rows, ends, said = run_job(tmp_path, 2, [(3, "gradient", 0)], how=["shrink"])
    done, n_lost = replay(rows, ends[0][1])
    assert done == list(range(N_STEPS)) and n_lost == 0, (done, n_lost)
    assert "generation 2 of the job has 1 rank" in said, said[-3000:]
