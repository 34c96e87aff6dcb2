# SPDX-License-Identifier: Apache-2.0
"""torch.distributed on the hvd backend with CUDA tensors: what tests/python/torch/c10d_suite.py
does on the CPU, and what only a device can show. On every rank.
"""
import pathlib
import sys

import torch
import torch.distributed as dist

import horovod.torch as hvd
import horovod.torch.c10d  # noqa: F401 - registers the backend

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "python" / "torch"))
import c10d_suite  # noqa: E402

if torch.cuda.get_device_name(0).startswith("Simulated"):
    import fallback  # noqa: F401


def slow(values):
    """A tensor whose values are still under way."""
    tensor = torch.full(values.shape, -7.0, device="cpu").cuda()
    torch.cuda.current_stream().synchronize()
    tensor.copy_(values.pin_memory(), non_blocking=True)
    return tensor


def check_order(rank, size, tries=10):
    """wait() orders the stream that it is called in; a tensor may be dropped at once."""
    side = torch.cuda.Stream()
    for i in range(tries):
        ones = torch.full((64,), float(rank + i), device="cpu")
        expected = torch.full((64,), float(sum(range(size)) + size * i), device="cpu")
        tensor = slow(ones)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), expected)
        tensor = slow(ones)
        work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(side):
            work.wait()
            assert torch.equal(tensor.cpu(), expected)
        whole = torch.empty(64 * size)
        work = dist.all_gather_into_tensor(whole, slow(ones), async_op=True)
        for _ in range(16):
            slow(torch.full((64,), -5.0, device="cpu"))
        work.wait()
        assert whole.cpu().view(size, 64)[:, 0].tolist() == [float(r + i) for r in range(size)]


def check_coalesced(rank, size):
    """Several operations of one kind, and others, as one work."""
    tensors = [slow(torch.full((8,), float(rank + i), device="cpu")) for i in range(5)]
    with dist._coalescing_manager(device=torch.device("cuda"), async_ops=True) as together:
        for tensor in tensors:
            dist.all_reduce(tensor)
    together.wait()
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor.cpu(),
                           torch.full((8,), float(sum(range(size)) + size * i), device="cpu"))


def check_completed_means_landed(rank, size):
    work = dist.all_reduce(slow(torch.ones(64, device="cpu")), async_op=True)
    work.wait()
    torch.cuda.synchronize()
    assert work.is_completed()
    dist.barrier()


def run():
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.set_default_device("cuda")
    c10d_suite.DEVICE = "cuda"
    dist.init_process_group("hvd")
    rank, size = dist.get_rank(), dist.get_world_size()
    for check in (check_order, check_coalesced, check_completed_means_landed,
                  c10d_suite.check_collectives, c10d_suite.check_mismatch, c10d_suite.check_works,
                  c10d_suite.check_ddp, c10d_suite.check_zero, c10d_suite.check_fsdp2):
        print(check.__name__, flush=True)
        check(rank, size)
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    return True
