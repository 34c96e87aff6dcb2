# SPDX-License-Identifier: Apache-2.0
"""Collectives on PyTorch tensors, as suites bound to the world or to a process set.

Runs on every rank; run(which set) is what the pytest module starts. Values are small
integers, so that sums are exact in every dtype and expected results can be written down.
"""
import itertools
import math
import os
import sys
import warnings

import pytest
import torch

import horovod.torch as hvd
from horovod.torch import mpi_ops

MOVED = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
         torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.complex64,
         torch.complex128]
REDUCED = [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
NUMBERS = [torch.uint8, torch.int8, torch.int16] + REDUCED
REDUCTIONS = {  # op -> the same of the inputs of all ranks, one below the other
    hvd.Sum: lambda inputs: inputs.sum(0),
    hvd.Min: lambda inputs: inputs.amin(0),
    hvd.Max: lambda inputs: inputs.amax(0),
    hvd.Product: lambda inputs: inputs.prod(0),
}
SHAPES = [(), (1,), (17,), (0,), (4, 5), (2, 3, 4)]


def values(shape, dtype, start=0):
    """Different small numbers, exact in dtype."""
    n = math.prod(shape)
    numbers = (torch.arange(n, dtype=torch.int64) + start) % 7
    return numbers.to(dtype).reshape(shape)


class Suite:
    """Bound to a process set: n members, this one is number me."""

    def __init__(self, process_set):
        self.set = process_set
        self.n = process_set.size()
        self.me = process_set.rank()
        self.ranks = process_set.ranks

    def run(self):
        for name in sorted(dir(self)):
            if name.startswith("check_"):
                print(name, flush=True)
                getattr(self, name)()


class Reductions(Suite):
    def check_every_dtype_shape_and_form(self):
        for dtype, shape in itertools.product(REDUCED, SHAPES):
            mine = values(shape, dtype, self.me)
            total = sum(values(shape, dtype, m).double() for m in range(self.n))
            before = mine.clone()
            out = hvd.allreduce(mine, op=hvd.Sum, process_set=self.set)
            assert out.dtype == dtype and out.shape == mine.shape
            assert torch.equal(out.double(), total) and torch.equal(mine, before)
            handle = hvd.allreduce_async(mine, op=hvd.Sum, process_set=self.set)
            assert torch.equal(hvd.synchronize(handle).double(), total) and hvd.poll(handle)
            inplace = mine.clone()
            result = hvd.allreduce_(inplace, op=hvd.Sum, process_set=self.set)
            assert result is inplace and torch.equal(inplace.double(), total)
            inplace = mine.clone()
            handle = hvd.allreduce_async_(inplace, op=hvd.Sum, process_set=self.set)
            assert hvd.synchronize(handle) is inplace and torch.equal(inplace.double(), total)

    def check_every_dtype_and_op(self):
        for dtype in NUMBERS:
            inputs = torch.stack([values((17,), torch.int64, m) % 3 + 1 for m in range(self.n)])
            for op, reduction in REDUCTIONS.items():
                expected = reduction(inputs)
                mine = inputs[self.me].to(dtype, copy=True)
                out = hvd.allreduce(mine, op=op, process_set=self.set)
                assert torch.equal(out.to(torch.int64), expected), (dtype, op, out)
                handles = [hvd.allreduce_async_(tensor, name=f"part.{i}", op=op,
                                                process_set=self.set)
                           for i, tensor in enumerate(mine.split(5))]
                for handle in handles:
                    hvd.synchronize(handle)
                assert torch.equal(mine.to(torch.int64), expected), (dtype, op, mine)

    def check_average_truncates_integers(self):
        mine = torch.tensor([self.me, -self.me, 7 * self.me + 1], dtype=torch.int32)
        total = sum(torch.tensor([m, -m, 7 * m + 1]) for m in range(self.n))
        expected = torch.trunc(total.double() / self.n).int()
        assert torch.equal(hvd.allreduce(mine, process_set=self.set), expected)
        mean = hvd.allreduce(mine.float(), process_set=self.set)
        assert torch.allclose(mean, total / self.n)

    def check_min_max_product(self):
        for dtype in (torch.int64, torch.float32, torch.bfloat16):
            mine = torch.tensor([self.me + 1, -self.me, 2], dtype=dtype)
            stack = torch.stack([torch.tensor([m + 1, -m, 2], dtype=dtype)
                                 for m in range(self.n)])
            for op, expected in ((hvd.Min, stack.amin(0)), (hvd.Max, stack.amax(0)),
                                 (hvd.Product, stack.double().prod(0).to(dtype))):
                assert torch.equal(hvd.allreduce(mine, op=op, process_set=self.set), expected)

    def check_scaling(self):
        mine = torch.ones(5) * 4
        out = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0,
                            process_set=self.set)
        assert torch.equal(out, torch.ones(5) * 6 * self.n)
        hvd.allreduce_(mine, prescale_factor=0.25, process_set=self.set)
        assert torch.equal(mine, torch.ones(5))

    def check_the_old_average_argument(self):
        mine = torch.ones(2) * self.me
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = hvd.allreduce(mine, average=False, process_set=self.set)
            hvd.allreduce_(mine.clone(), True, process_set=self.set)
            hvd.grouped_allreduce([mine], average=True, process_set=self.set)
        assert torch.equal(out, torch.ones(2) * sum(range(self.n)))
        about = [item.filename for item in caught
                 if issubclass(item.category, DeprecationWarning)]
        assert about == [__file__] * 3  # the lines above: elsewhere Python would not show them
        with pytest.raises(ValueError):
            hvd.allreduce(mine, average=True, op=hvd.Sum, process_set=self.set)

    def check_groups(self):
        tensors = [values(shape, torch.float32, self.me) for shape in SHAPES]
        totals = [sum(values(shape, torch.float32, m) for m in range(self.n)) for shape in SHAPES]
        out = hvd.grouped_allreduce(tensors, op=hvd.Sum, process_set=self.set)
        assert isinstance(out, list) and all(map(torch.equal, out, totals))
        handle = hvd.grouped_allreduce_async(tensors, name="g", op=hvd.Sum, process_set=self.set)
        assert all(map(torch.equal, hvd.synchronize(handle), totals))
        mixed = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(3, 2).t()]
        out = hvd.grouped_allreduce_(mixed, name="m", op=hvd.Sum, process_set=self.set)
        assert isinstance(out, tuple) and all(a is b for a, b in zip(out, mixed))
        assert all(torch.equal(t, torch.full_like(t, self.n)) for t in mixed)

    def check_groups_of_nothing(self):
        assert hvd.grouped_allreduce([], process_set=self.set) == []
        assert hvd.grouped_allreduce_([], process_set=self.set) == ()
        assert hvd.grouped_allgather([], process_set=self.set) == ()
        assert hvd.grouped_reducescatter([], process_set=self.set) == []

    def check_bool(self):
        mine = torch.tensor([True, False, self.me == 0])
        several = self.n > 1
        for op, last in ((hvd.Sum, True), (hvd.Max, True), (hvd.Min, not several),
                         (hvd.Product, not several)):
            out = hvd.allreduce(mine, op=op, process_set=self.set)
            assert out.dtype == torch.bool and out.tolist() == [True, False, last]
        for average in (hvd.allreduce, hvd.allreduce_, hvd.reducescatter):
            with pytest.raises(ValueError, match="not supported"):
                average(mine, process_set=self.set)

    def check_strided_tensors(self):
        for source in (torch.arange(12.).view(3, 4).t(), torch.arange(10.)[::2],
                       torch.ones(1).expand(4)):
            mine = source + 0 if source.stride() == (0,) else source.clone(
                memory_format=torch.preserve_format)
            out = hvd.allreduce(source, op=hvd.Sum, process_set=self.set)
            assert torch.equal(out, source * self.n)
            view = torch.zeros(*mine.shape, 2)[..., 0]
            view.copy_(mine)
            assert not view.is_contiguous() or view.numel() <= 1
            assert hvd.allreduce_(view, op=hvd.Sum, process_set=self.set) is view
            assert torch.equal(view, source * self.n)

    def check_complex(self):
        mine = torch.tensor([1 + 2j, 3j], dtype=torch.complex64)
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, process_set=self.set), mine * self.n)
        hvd.allreduce_(mine, process_set=self.set)
        assert torch.equal(mine, torch.tensor([1 + 2j, 3j]))
        out = hvd.allreduce(mine.conj(), op=hvd.Sum, process_set=self.set)
        assert torch.equal(out, torch.tensor([1 - 2j, -3j]) * self.n)
        with pytest.raises(ValueError, match="complex"):
            hvd.allreduce(mine, op=hvd.Max, process_set=self.set)

    def check_tensors_that_are_not_on_the_host(self):
        """They go through host memory; here only a stand-in that says it is elsewhere."""
        class Far(torch.Tensor):
            is_cpu = False

        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            mine = (torch.ones(4) * (self.me + 1)).to(dtype).as_subclass(Far)
            total = torch.full((4,), self.n * (self.n + 1) / 2).to(dtype)
            out = hvd.allreduce(mine, op=hvd.Sum, process_set=self.set)
            assert torch.equal(out, total) and out.data_ptr() != mine.data_ptr()
            copies = [mine.clone(), mine.clone()]
            handle = hvd.allreduce_async_(copies[0], op=hvd.Sum, process_set=self.set)
            assert torch.equal(copies[0], mine)  # what is on its way is the copy
            assert hvd.synchronize(handle) is copies[0] and torch.equal(copies[0], total)
            hvd.grouped_allreduce_([copies[1]], op=hvd.Sum, process_set=self.set)
            assert torch.equal(copies[1], total)
            root = self.ranks[-1]
            assert hvd.broadcast_(mine, root, process_set=self.set) is mine
            assert torch.equal(mine, torch.full((4,), float(self.n)).to(dtype))
            for gathered in (hvd.allgather(mine, process_set=self.set),
                             *hvd.grouped_allgather([mine], process_set=self.set)):
                assert torch.equal(gathered, torch.cat([mine] * self.n))

    def check_many_in_flight_and_out_of_order(self):
        handles = {}
        order = list(range(60))
        if self.me % 2:
            order.reverse()
        for i in order:
            handles[i] = hvd.allreduce_async(torch.full((i + 1,), float(i)), name=f"many.{i}",
                                             op=hvd.Sum, process_set=self.set)
        for i in order:
            assert torch.equal(hvd.synchronize(handles[i]),
                               torch.full((i + 1,), float(i * self.n)))

    def check_large(self):
        mine = torch.arange(600_001, dtype=torch.float32) % 100
        out = hvd.allreduce(mine, op=hvd.Sum, process_set=self.set)
        assert torch.equal(out, mine * self.n)

    def check_reducescatter(self):
        for rows in (self.n, 2 * self.n + 1, 1):
            mine = values((rows, 3), torch.float32, self.me)
            total = sum(values((rows, 3), torch.float32, m) for m in range(self.n))
            counts = [rows // self.n + (1 if m < rows % self.n else 0) for m in range(self.n)]
            start = sum(counts[:self.me])
            own = total[start:start + counts[self.me]]
            out = hvd.reducescatter(mine, op=hvd.Sum, process_set=self.set)
            assert torch.equal(out, own)
            out = hvd.reducescatter(mine, process_set=self.set)
            assert torch.allclose(out, own / self.n)
            both = hvd.grouped_reducescatter([mine, mine.double()], op=hvd.Sum,
                                             process_set=self.set)
            assert torch.equal(both[0], own) and torch.equal(both[1], own.double())
        with pytest.raises(hvd.HorovodInternalError, match="only supports AVERAGE and SUM"):
            hvd.reducescatter(torch.ones(4), op=hvd.Max, process_set=self.set)

    def check_sparse(self):
        indices = torch.tensor([[0, 2], [1, self.me % 3]])
        mine = torch.sparse_coo_tensor(indices, torch.tensor([1., 2.]), (3, 3))
        dense = sum(torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, m % 3]]),
                                            torch.tensor([1., 2.]), (3, 3)).to_dense()
                    for m in range(self.n))
        wait = hvd.sparse_allreduce_async(mine, "s", hvd.Sum, self.set)
        assert callable(wait) and torch.equal(wait().to_dense(), dense)
        out = hvd.sparse_allreduce_async(mine, "s", hvd.Average, self.set)()
        assert torch.allclose(out.to_dense(), dense / self.n)
        empty = torch.sparse_coo_tensor((3, 3))
        assert hvd.synchronize(hvd.sparse_allreduce_async(empty, "e", hvd.Sum,
                                                          self.set))._nnz() == 0

    def check_compression(self):
        mine = torch.tensor([0.5, 1.5, -2])
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            out = hvd.allreduce(mine, op=hvd.Sum, compression=compression, process_set=self.set)
            assert out.dtype == torch.float32 and torch.equal(out, mine * self.n)


class Movements(Suite):
    def check_allgather(self):
        for dtype in MOVED:
            mine = values((self.me + 1, 3), dtype, self.me)
            expected = torch.cat([values((m + 1, 3), dtype, m) for m in range(self.n)])
            out = hvd.allgather(mine, process_set=self.set)
            assert out.dtype == dtype and torch.equal(out, expected)
        handle = hvd.allgather_async(mine, name="a", process_set=self.set)
        assert torch.equal(hvd.synchronize(handle), expected)
        parts = hvd.grouped_allgather([torch.ones(2), torch.ones(self.me, 2, dtype=torch.int64)],
                                      process_set=self.set)
        assert isinstance(parts, tuple) and parts[0].shape == (2 * self.n,)
        assert parts[1].shape == (sum(range(self.n)), 2) and parts[1].dtype == torch.int64
        strided = torch.arange(6.).view(2, 3).t()
        assert torch.equal(hvd.allgather(strided, process_set=self.set),
                           torch.cat([strided] * self.n))
        nothing = hvd.allgather(torch.empty(0, 4), process_set=self.set)
        assert nothing.shape == (0, 4)
        kept = hvd.allgather(torch.full((1000,), 5.), process_set=self.set)
        for _ in range(20):  # the memory of a result is its own
            hvd.allgather(torch.zeros(1000), process_set=self.set)
        assert torch.equal(kept, torch.full((1000 * self.n,), 5.))

    def check_broadcast(self):
        for dtype, root in itertools.product(MOVED, (self.ranks[0], self.ranks[-1])):
            mine = values((3, 2), dtype, hvd.rank())
            expected = values((3, 2), dtype, root)
            assert torch.equal(hvd.broadcast(mine, root, process_set=self.set), expected)
            assert torch.equal(mine, values((3, 2), dtype, hvd.rank()))
            assert hvd.broadcast_(mine, root, process_set=self.set) is mine
            assert torch.equal(mine, expected)
        handle = hvd.broadcast_async(torch.ones(2) * hvd.rank(), root, process_set=self.set)
        assert torch.equal(hvd.synchronize(handle), torch.ones(2) * root)
        column = torch.ones(3, 3)[:, 0] * hvd.rank()
        handle = hvd.broadcast_async_(column, root, "column", self.set)
        assert hvd.synchronize(handle) is column
        assert torch.equal(column, torch.full((3,), float(root)))

    def check_float8_moves_and_does_not_add(self):
        for name in ("float8_e4m3fn", "float8_e5m2"):
            if not hasattr(torch, name):
                continue
            mine = torch.tensor([0.5, self.me], dtype=torch.float32).to(getattr(torch, name))
            out = hvd.allgather(mine, process_set=self.set)
            assert out.dtype == mine.dtype
            expected = [value for m in range(self.n) for value in (0.5, m)]
            assert out.float().tolist() == expected
            with pytest.raises(ValueError, match="not supported"):
                hvd.allreduce(mine, process_set=self.set)

    def check_alltoall(self):
        for dtype in MOVED:
            mine = values((self.n * 2, 2), dtype, self.me)
            out = hvd.alltoall(mine, process_set=self.set)
            expected = torch.cat([values((self.n * 2, 2), dtype, m)[2 * self.me:2 * self.me + 2]
                                  for m in range(self.n)])
            assert torch.equal(out, expected)
        splits = [m + 1 for m in range(self.n)]
        mine = torch.arange(sum(splits)) + 100 * self.me
        out, received = hvd.alltoall(mine, splits=splits, process_set=self.set)
        start = sum(splits[:self.me])
        assert out.tolist() == [100 * m + start + i for m in range(self.n)
                                for i in range(self.me + 1)]
        assert received.dtype == torch.int32 and received.tolist() == [self.me + 1] * self.n
        handle = hvd.alltoall_async(mine, torch.tensor(splits, dtype=torch.int32),
                                    process_set=self.set)
        assert hvd.synchronize(handle)[0].tolist() == out.tolist()

    def check_barrier(self):
        assert hvd.barrier(process_set=self.set) is None


class Gradients(Suite):
    def gradient(self, function, tensor, weights=None):
        tensor = tensor.clone().requires_grad_()
        out = function(tensor)
        out = out[0] if isinstance(out, (tuple, list)) else out
        out.backward(torch.ones_like(out) if weights is None else weights)
        return tensor.grad

    def check_allreduce(self):
        ones = torch.ones(3, 2)
        for op, factor in ((hvd.Sum, self.n), (hvd.Average, 1)):
            grad = self.gradient(lambda t: hvd.allreduce(t, op=op, process_set=self.set), ones)
            assert torch.equal(grad, ones * factor)
            grad = self.gradient(lambda t: hvd.grouped_allreduce([t, t * 2], op=op,
                                                                 process_set=self.set), ones)
            assert torch.equal(grad, ones * factor)
        grad = self.gradient(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5,
                                                     process_set=self.set), ones)
        assert torch.equal(grad, ones * self.n * 0.5)
        grad = self.gradient(lambda t: hvd.allreduce(t, compression=hvd.Compression.fp16,
                                                     process_set=self.set), ones)
        assert torch.equal(grad, ones)

    def check_allgather(self):
        rows = self.me + 1
        total = sum(m + 1 for m in range(self.n))
        weights = torch.arange(total * 2.).view(total, 2) * (self.me + 1)
        mean = torch.arange(total * 2.).view(total, 2) * (total / self.n)
        start = sum(m + 1 for m in range(self.me))
        grad = self.gradient(lambda t: hvd.allgather(t, process_set=self.set),
                             torch.ones(rows, 2), weights)
        assert torch.allclose(grad, mean[start:start + rows])
        grad = self.gradient(lambda t: hvd.grouped_allgather([t], process_set=self.set),
                             torch.ones(rows, 2), weights)
        assert torch.allclose(grad, mean[start:start + rows])

    def check_broadcast(self):
        root = self.ranks[-1]
        grad = self.gradient(lambda t: hvd.broadcast(t, root, process_set=self.set),
                             torch.ones(3), torch.full((3,), float(self.me)))
        expected = sum(range(self.n)) / self.n if hvd.rank() == root else 0
        assert torch.allclose(grad, torch.full((3,), float(expected)))

    def check_alltoall(self):
        splits = [m + 1 for m in range(self.n)]
        received = self.n * (self.me + 1)
        weights = torch.full((received,), float(self.me))
        grad = self.gradient(lambda t: hvd.alltoall(t, splits=splits, process_set=self.set),
                             torch.ones(sum(splits)), weights)
        assert grad.tolist() == [float(m) for m in range(self.n) for _ in range(m + 1)]

    def check_reducescatter(self):
        ones = torch.ones(self.n * 2, 2)
        for op, factor in ((hvd.Sum, self.n), (hvd.Average, 1)):
            grad = self.gradient(lambda t: hvd.reducescatter(t, op=op, process_set=self.set), ones)
            assert torch.equal(grad, ones * factor)
            grad = self.gradient(lambda t: hvd.grouped_reducescatter([t], op=op,
                                                                     process_set=self.set), ones)
            assert torch.equal(grad, ones * factor)

    def check_under_torch_func(self):
        ones = torch.ones(self.n * 2)
        collectives = [  # and what the gradient of the sum of its results is
            (lambda t: hvd.allreduce(t, op=hvd.Sum, process_set=self.set), self.n),
            (lambda t: hvd.grouped_allreduce([t], op=hvd.Sum, process_set=self.set)[0], self.n),
            (lambda t: hvd.allgather(t, process_set=self.set), 1),
            (lambda t: hvd.grouped_allgather([t], process_set=self.set)[0], 1),
            (lambda t: hvd.broadcast(t, self.ranks[0], process_set=self.set), int(self.me == 0)),
            (lambda t: hvd.alltoall(t, process_set=self.set), 1),
            (lambda t: hvd.reducescatter(t, op=hvd.Sum, process_set=self.set), self.n),
            (lambda t: hvd.grouped_reducescatter([t], process_set=self.set)[0], 1),
        ]
        for i, (collective, factor) in enumerate(collectives):
            grad = torch.func.grad(lambda t: (2 * collective(t)).sum())(ones)
            assert torch.equal(grad, ones * 2 * factor), (i, grad)
        batch = torch.stack([ones, 3 * ones], dim=1)
        for collective in (collectives[0][0], collectives[4][0]):
            mapped = torch.func.vmap(collective, in_dims=1, out_dims=1)(batch)
            assert torch.equal(mapped, collective(batch))


class Mistakes(Suite):
    """What one rank or several do wrong becomes an exception on all that are concerned."""

    def check_arguments(self):
        with pytest.raises(ValueError, match="invalid root rank 99"):
            hvd.broadcast(torch.ones(1), 99, process_set=self.set)
        with pytest.raises(ValueError, match="1D splits"):
            hvd.alltoall(torch.ones(4), splits=torch.ones(2, 2, dtype=torch.int32),
                         process_set=self.set)
        with pytest.raises(ValueError, match="32-bit integer"):
            hvd.alltoall(torch.ones(4), splits=torch.ones(self.n), process_set=self.set)
        with pytest.raises(ValueError, match="greater than the first dimension"):
            hvd.alltoall(torch.ones(1), splits=[5] * self.n, process_set=self.set)
        with pytest.raises(ValueError, match="Number of entries in splits"):
            hvd.alltoall(torch.ones(9), splits=[1] * (self.n + 1), process_set=self.set)
        with pytest.raises(ValueError, match="not supported"):
            hvd.allreduce_(torch.sparse_coo_tensor((2, 2)), process_set=self.set)
        for collective in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allgather,
                           lambda value, **kwargs: hvd.broadcast(value, self.ranks[0], **kwargs),
                           lambda value, **kwargs: hvd.broadcast_(value, self.ranks[0], **kwargs),
                           lambda value, **kwargs: hvd.grouped_allreduce([value], **kwargs),
                           hvd.alltoall, hvd.reducescatter):
            for value in ([1, 2], [torch.ones(2)], 3):
                with pytest.raises(TypeError, match="a torch.Tensor is expected, not"):
                    collective(value, process_set=self.set)
        for collective in (hvd.allreduce, hvd.allreduce_, hvd.reducescatter):
            for op in ("sum", torch.distributed.ReduceOp.SUM, True):
                with pytest.raises(TypeError, match="one of hvd.Average, hvd.Sum"):
                    collective(torch.ones(self.n), op=op, process_set=self.set)
        assert hvd.synchronize(12345) is None and hvd.poll(12345)
        nobodys = hvd.ProcessSet([0])
        for call in (lambda: hvd.allreduce(torch.ones(1), process_set=nobodys),
                     lambda: hvd.allreduce_(torch.ones(1), process_set=nobodys),
                     lambda: hvd.allgather(torch.ones(1), process_set=nobodys),
                     lambda: hvd.barrier(process_set=nobodys)):
            with pytest.raises(ValueError, match="does not exist, or has not been registered"):
                call()

    def check_disagreement(self):
        if self.n < 2:
            return
        odd = self.me % 2
        wrong = [
            ("dtype", lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64 if odd
                                                       else torch.float32), name="dtype",
                                            process_set=self.set), "Mismatched data types"),
            ("shape", lambda: hvd.allreduce(torch.ones(2 + odd), name="shape",
                                            process_set=self.set), "Mismatched ALLREDUCE tensor"),
            ("op", lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if odd else hvd.Max, name="op",
                                         process_set=self.set), "Mismatched reduction operation"),
            ("root", lambda: hvd.broadcast(torch.ones(2), self.ranks[odd], name="root",
                                           process_set=self.set), "Mismatched BROADCAST root"),
        ]
        for _, call, text in wrong:
            with pytest.raises(hvd.HorovodInternalError, match=text) as caught:
                call()
            assert "ops_suite.py:" in str(caught.value)
        out = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=self.set)  # the job goes on
        assert torch.equal(out, torch.ones(2) * self.n)

    def check_a_name_twice(self):
        if self.n < 2:
            return
        if self.me == 0:
            first = hvd.allreduce_async(torch.ones(2), name="twice", process_set=self.set)
            with pytest.raises(ValueError, match="same name as another tensor"):
                hvd.allreduce_async(torch.ones(2), name="twice", process_set=self.set)
        hvd.barrier(process_set=self.set)
        if self.me != 0:
            first = hvd.allreduce_async(torch.ones(2), name="twice", process_set=self.set)
        assert torch.equal(hvd.synchronize(first), torch.ones(2))


def run(which):
    """On every rank: all suites on the world ("world"), or on a process set of two ("set")."""
    size = int(os.environ["HOROVOD_SIZE"])
    if which == "world":
        hvd.init()
        process_set = hvd.global_process_set
    else:
        process_set = hvd.ProcessSet([size - 1, 0])
        hvd.init(process_sets=[process_set])
    for suite in (Reductions, Movements, Gradients, Mistakes):
        if process_set.included():
            suite(process_set).run()
        else:
            with pytest.raises(ValueError, match="not a member of the provided process set"):
                hvd.allreduce(torch.ones(1), process_set=process_set)
        hvd.barrier()
    assert mpi_ops.is_homogeneous()
    hvd.shutdown()
    return True


if __name__ == "__main__":  # under a launcher
    run(sys.argv[1])
