# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on the hvd backend, on every rank."""
import datetime
import importlib
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import horovod.torch as hvd
import horovod.torch.c10d  # noqa: F401 - registers the backend

ROWS = 4
DEVICE = "cpu"  # tests/gpu/c10d_device.py runs it on another


def check_collectives(rank, size):
    tensor = torch.arange(5.) + rank
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(5.) * size + sum(range(size)))
    for op, expected in ((dist.ReduceOp.AVG, sum(range(size)) / size), (dist.ReduceOp.MIN, 0),
                         (dist.ReduceOp.MAX, size - 1)):
        tensor = torch.full((3,), float(rank))
        work = dist.all_reduce(tensor, op=op, async_op=True)
        work.wait()
        assert torch.allclose(tensor, torch.full((3,), float(expected)))
    with pytest.raises(ValueError, match="does not support RedOpType.BAND"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32), op=dist.ReduceOp.BAND)
    tensor = torch.full((2, 2), float(rank))
    dist.broadcast(tensor, size - 1)
    assert torch.equal(tensor, torch.full((2, 2), float(size - 1)))
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert torch.equal(torch.stack(parts)[:, 0], torch.arange(float(size)))
    whole = torch.empty(size * 2)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    assert whole.tolist() == [float(r) for r in range(size) for _ in range(2)]
    out = torch.empty(3)
    dist.reduce_scatter_tensor(out, torch.arange(3. * size))
    assert torch.equal(out, (torch.arange(3.) + 3 * rank) * size)
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.full((2,), float(r)) for r in range(size)])
    assert torch.equal(out, torch.full((2,), float(rank * size)))
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.arange(float(size)))
    assert torch.equal(out, torch.full((size,), float(rank)))
    tensor = torch.ones(2)
    dist.reduce(tensor, 0)
    assert torch.equal(tensor, torch.full((2,), float(size if rank == 0 else 1)))
    parts = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), parts, dst=0)
    if rank == 0:
        assert torch.cat(parts).tolist() == [float(r) for r in range(size)]
    out = torch.empty(2)
    dist.scatter(out, [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None, 0)
    assert torch.equal(out, torch.full((2,), float(rank)))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    dist.barrier()


def check_mismatch(rank, size):
    """Every rank is told, by whatever it waits with, and the group goes on."""
    waits = (lambda tensor: dist.all_reduce(tensor),
             lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
             lambda tensor: dist.all_reduce(tensor, async_op=True).get_future().wait())
    for wait in waits:
        try:
            wait(torch.ones(3 + rank))
        except RuntimeError as error:
            assert "Mismatched ALLREDUCE tensor shapes" in str(error), error
        else:
            raise AssertionError("a mismatch went unnoticed")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def check_works(rank, size):
    """What a work says of itself, and a wait that gives up."""
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    if DEVICE != "cpu":
        torch.cuda.synchronize()  # there wait() orders the stream
    assert work.is_completed() and work.get_future().done()
    assert dist.barrier(async_op=True).wait(datetime.timedelta(seconds=60))
    tensor = torch.ones(2)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        try:
            work.wait(datetime.timedelta(seconds=0.1))
        except RuntimeError as error:
            assert "not done after 0.1 s" in str(error)
        else:
            raise AssertionError("a rank that has not come was not missed")
        hvd.broadcast_object("now")
        work.wait()
    else:
        hvd.broadcast_object(None)
        dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((2,), float(size)))


def check_nested_works(rank, size):
    """A function behind a work may start others and wait for them, as PowerSGD does."""
    def again(future):
        tensor = future.value()[0]
        return [dist.all_reduce(tensor, async_op=True).get_future().wait()[0] * 2]

    for _ in range(3):  # one by one: collectives of two threads have no order all ranks agree on
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again)
        assert torch.equal(future.wait()[0], torch.full((2,), 2. * size * size))
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    torch.manual_seed(1)
    model = nn.Linear(16, 16)
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel.register_comm_hook(hooks.PowerSGDState(None, start_powerSGD_iter=2),
                                hooks.powerSGD_hook)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        parallel(torch.randn(4, 16)).pow(2).sum().backward()
        optimizer.step()
    weights = [torch.empty(16, 16) for _ in range(size)]
    dist.all_gather(weights, model.weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights)


def make_model():
    torch.manual_seed(4)
    with torch.device("cpu"):  # whose random numbers it is to have
        model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    return model.to(DEVICE)


def data_of(step, size):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(ROWS * size, n, generator=generator, device="cpu").to(DEVICE)
                 for n in (3, 2))


def train(model, optimizer, rank, size, share):
    for step in range(4):
        data, target = data_of(step, size)
        if share:
            data, target = (t[rank * ROWS:(rank + 1) * ROWS] for t in (data, target))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data), target).backward()
        optimizer.step()


def check_ddp(rank, size):
    alone, ours = make_model(), make_model()
    parallel = nn.parallel.DistributedDataParallel(ours, bucket_cap_mb=0.0001)
    train(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), rank, size, True)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), rank, size, False)
    for p, q in zip(ours.parameters(), alone.parameters()):
        assert torch.allclose(p, q, atol=1e-5)


def check_fsdp2(rank, size):
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return "no FSDP2 in this version"
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (size,))
    if DEVICE == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        return "FSDP2 of this version cannot run on the CPU"
    alone, ours = make_model(), make_model()
    for layer in (ours[0], ours[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    train(ours, torch.optim.SGD(ours.parameters(), lr=0.1), rank, size, True)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), rank, size, False)
    for p, q in zip(ours.parameters(), alone.parameters()):
        assert torch.allclose(p.full_tensor(), q, atol=1e-5)
    return "FSDP2"


def check_zero(rank, size):
    """The state of the optimizer is divided among the ranks; the weights are as without."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    alone, ours = make_model(), make_model()
    parallel = nn.parallel.DistributedDataParallel(ours)
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.SGD, lr=0.1,
                                        momentum=0.9)
    train(parallel, optimizer, rank, size, True)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), rank, size, False)
    for p, q in zip(ours.parameters(), alone.parameters()):
        assert torch.allclose(p, q, atol=1e-5)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(ours.parameters()))


def run(started_by):
    """started_by: "launcher" has the environment of a launcher, "torch" only torch's store."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    if started_by == "launcher":
        dist.init_process_group("hvd")
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    else:
        for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
            del os.environ[name]
        store = os.environ["TEST_STORE"]
        dist.init_process_group("hvd", init_method=f"file://{store}", rank=rank, world_size=size)
    check_collectives(rank, size)
    check_mismatch(rank, size)
    check_works(rank, size)
    check_nested_works(rank, size)
    check_ddp(rank, size)
    check_zero(rank, size)
    found = check_fsdp2(rank, size)
    print(found)
    dist.barrier()
    dist.destroy_process_group()
    return True


def check_group(rank, ranks, group):
    """The collectives of a group whose ranks are counted anew."""
    n, me = len(ranks), ranks.index(rank)
    assert (dist.get_rank(group), dist.get_world_size(group)) == (me, n)
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((3,), float(sum(ranks))))
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, ranks[-1], group=group)
    assert tensor.item() == ranks[-1]
    whole, part = torch.empty(n), torch.empty(1)
    dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]), group=group)
    assert whole.tolist() == ranks
    dist.reduce_scatter_tensor(part, whole, group=group)
    assert part.item() == n * rank
    dist.all_to_all_single(whole, torch.arange(float(n)), group=group)
    assert whole.tolist() == [me] * n
    objects = [None] * n
    dist.all_gather_object(objects, rank, group=group)
    assert objects == ranks
    dist.barrier(group=group)


def check_two_dimensions(rank, size):
    """A mesh of groups: sharded along one dimension, replicated along the other."""
    if not hasattr(dist, "device_mesh"):
        return
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        group = mesh.get_group(name)
        check_group(rank, dist.get_process_group_ranks(group), group)
    if not hasattr(torch.cpu.Stream, "record_event"):
        return
    from torch.distributed.fsdp import fully_shard
    alone, ours = make_model(), make_model()
    fully_shard(ours, mesh=mesh)
    train(ours, torch.optim.SGD(ours.parameters(), lr=0.1), rank, size, True)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), rank, size, False)
    for p, q in zip(ours.parameters(), alone.parameters()):
        assert torch.allclose(p.full_tensor(), q, atol=1e-5)


def groups():
    """Groups of some of the ranks, made and destroyed while the others do not take part."""
    dist.init_process_group("hvd")
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = [1, 2]
    crossing = dist.new_group(shared)
    for _ in range(3):  # whoever is done leaves, while the others may still receive
        pairs = [[0, size - 1], list(range(1, size - 1))]
        made = [dist.new_group(ranks) for ranks in pairs]
        for ranks, group in zip(pairs, made):
            if rank in ranks:
                check_group(rank, ranks, group)
                dist.destroy_process_group(group)
    if rank in shared:
        check_group(rank, shared, crossing)
    check_two_dimensions(rank, size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    dist.destroy_process_group()
    return True


def beside_gloo():
    """Tensors of the CPU are reduced here, those of other devices by somebody else."""
    dist.init_process_group("cpu:hvd,cuda:gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    check_collectives(rank, size)
    check_mismatch(rank, size)
    dist.destroy_process_group()
    return backend.name()


def leave():
    """Rank 1 raises in the middle of training; what rank 0 is told, and by which call."""
    dist.init_process_group("hvd")
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = nn.parallel.DistributedDataParallel(make_model())
    train(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), rank, size, True)
    if rank == 1:
        raise KeyError("of the user")
    told = []
    for call in (lambda: parallel(torch.ones(ROWS, 3)).sum().backward(),
                 lambda: dist.all_reduce(torch.ones(3)),
                 lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
                 dist.barrier):
        try:
            call()
        except RuntimeError as error:
            told.append(str(error))
    return told
