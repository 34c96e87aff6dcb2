# SPDX-License-Identifier: Apache-2.0
"""Elastic training with PyTorch under horovodrun: a rank dies, the others train every sample."""
import pathlib
import re

from ranks import run_after_a_loss

import horovod

# Every rank trains its share of 64 samples, twice; a rank of the second host dies in the middle.
TRAIN = """
import os, pathlib, sys
import torch
import horovod.torch as hvd

N_SAMPLES = 64
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
                                     named_parameters=model.named_parameters())
dataset = torch.utils.data.TensorDataset(torch.arange(N_SAMPLES, dtype=torch.float32))
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
order = pathlib.Path(sys.argv[1])


@hvd.elastic.run
def train(state):
    while state.epoch < 2:
        for batch, (numbers,) in enumerate(torch.utils.data.DataLoader(
                dataset, batch_size=4, sampler=state.sampler)):
            if (os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1" and state.epoch == 0 and batch == 2
                    and order.exists()):
                order.unlink()
                os._exit(3)
            state.optimizer.zero_grad()
            state.model(numbers[:, None].expand(-1, 4) / N_SAMPLES).sum().backward()
            state.optimizer.step()
            print("epoch", state.epoch, "trained", *numbers.int().tolist(), flush=True)
            state.sampler.record_batch(batch, len(numbers))
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


train(state)
weights = torch.cat([value.detach().flatten() for value in model.parameters()])
everywhere = hvd.allgather(weights[None])
assert torch.equal(everywhere, everywhere[:1].expand_as(everywhere)), everywhere
print("done on", hvd.size(), "ranks", flush=True)
"""


def test_training_goes_on(tmp_path: pathlib.Path):
    printed, said = run_after_a_loss(tmp_path, TRAIN)
    for epoch in range(2):
        trained = set()
        for line in re.findall(rf"epoch {epoch} trained ([\d ]+)", printed):
            trained.update(map(int, line.split()))
        assert trained == set(range(64)), f"epoch {epoch}: {sorted(trained)}\n{said}"


def count_to_three():
    from horovod.common import basics as hvd
    from horovod.common.elastic import ObjectState, run_fn
    from horovod.common.objects import broadcast_object

    def count(state):
        while state.number < 3:
            state.number += 1
            state.commit()
        return state.number, hvd.rank()

    hvd.init()
    return run_fn(count, hvd.rejoin)(ObjectState(broadcast_object, hvd.rank, number=0))


def test_function():
    results = horovod.run(count_to_three, num_proc=2, min_num_proc=2,
                          hosts="localhost:1,127.0.0.1:1")
    assert results == [(3, 0), (3, 1)]


SETS = """
import os, pathlib, sys
import torch
import horovod.torch as hvd

order = pathlib.Path(sys.argv[1])
pair, late = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 2])
hvd.init(process_sets=[pair, late])
alone = hvd.add_process_set([1])
state = hvd.elastic.TorchState(step=0)


@hvd.elastic.run
def train(state):
    while state.step < 8:
        if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1" and state.step == 2 and order.exists():
            order.unlink()
            os._exit(3)
        hvd.allreduce(torch.ones(1), name="all")
        if pair.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="pair", process_set=pair) == 2
        if alone.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="one", process_set=alone) == 1
        state.step += 1
        state.commit()


train(state)
assert pair.size() == 2 and alone.size() == 1 and late.process_set_id is None, (pair, alone, late)
assert hvd.add_process_set([1]).process_set_id == alone.process_set_id  # as a new rank would
assert hvd.remove_process_set(alone)
print("done on", hvd.size(), "ranks", flush=True)
"""


def test_process_sets_stay(tmp_path: pathlib.Path):
    _, said = run_after_a_loss(tmp_path, SETS, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    told = "process set [0, 2] is not available while the elastic job has only 2 ranks"
    assert said.count(told) == 2
