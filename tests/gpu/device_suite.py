# SPDX-License-Identifier: Apache-2.0
"""horovod.torch on CUDA tensors: every operation gives what it gives on the CPU, whatever the order
in which the device does its work.

Runs on every rank, on a simulated GPU or a real one; run() is what the pytest module starts. Inputs
are made by asynchronous copies, so an operation that does not wait for its input reads old values.
"""
import ctypes
import time

import torch

import horovod.torch as hvd

if torch.cuda.get_device_name(0).startswith("Simulated"):
    import fallback  # noqa: F401

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
          torch.uint8, torch.int16]
OLD = 99


def values(shape, dtype, start):
    n = torch.Size(shape).numel()
    return ((torch.arange(n, dtype=torch.int64) + start) % 5 + 1).to(dtype).reshape(shape)


def made_on_device(host):
    """A tensor whose values are still under way: old ones are there, the right ones are queued."""
    tensor = torch.empty(host.shape, dtype=host.dtype, device="cuda")
    tensor.copy_(torch.full_like(host, OLD))
    torch.cuda.current_stream().synchronize()
    tensor.copy_(host.pin_memory(), non_blocking=True)
    return tensor


def read(tensor):
    """Its values, in the order of the current stream."""
    assert tensor.is_cuda
    return tensor.to("cpu")


class Device:
    def run(self):
        for name in sorted(dir(self)):
            if name.startswith("check_"):
                print(name, flush=True)
                getattr(self, name)()
                torch.cuda.synchronize()

    def both(self, function, *hosts, exact=True):
        """The same on the CPU and on the device."""
        there = function(*[made_on_device(host) for host in hosts])
        here = function(*[host.clone() for host in hosts])
        there, here = (value if isinstance(value, (list, tuple)) else [value]
                       for value in (there, here))
        for a, b in zip(there, here):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.equal(read(a), b) if exact else torch.allclose(read(a), b), (read(a), b)

    def check_allreduce(self):
        for dtype in DTYPES:
            for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Average):
                host = values((3, 5), dtype, hvd.rank())
                self.both(lambda x: hvd.allreduce(x, op=op), host)
                self.both(lambda x: hvd.allreduce_(x, op=op), host)

    def check_large_and_scaled(self):
        host = values((300, 1001), torch.float32, hvd.rank())
        self.both(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5,
                                          postscale_factor=3.0), host)

    def check_scalars_and_empty(self):
        self.both(hvd.allreduce, torch.tensor(float(hvd.rank())))
        self.both(hvd.allreduce, torch.empty(0, 3))

    def check_groups(self):
        hosts = [values((i + 1, 7), torch.float32, hvd.rank() + i) for i in range(5)]
        self.both(lambda *xs: hvd.grouped_allreduce(list(xs), op=hvd.Sum), *hosts)
        self.both(lambda *xs: hvd.grouped_allreduce_(list(xs), op=hvd.Sum), *hosts)
        self.both(lambda *xs: hvd.grouped_allgather(list(xs)), *hosts)

    def check_many_in_flight(self):
        hosts = [values((64,), torch.float32, hvd.rank() + i) for i in range(50)]
        tensors = [made_on_device(host) for host in hosts]
        handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"many.{i}")
                   for i, tensor in enumerate(tensors)]
        for i, handle in enumerate(handles):
            expected = sum(values((64,), torch.float32, r + i) for r in range(hvd.size()))
            assert torch.equal(read(hvd.synchronize(handle)), expected)

    def check_memory_lives_long_enough(self):
        """The caller drops its tensors at once; the allocator gives their memory to others."""
        for i in range(10):
            host = values((256,), torch.float32, hvd.rank() + i)
            handle = hvd.allreduce_async(made_on_device(host), op=hvd.Sum, name=f"dropped.{i}")
            junk = [made_on_device(torch.full((256,), -5.0)) for _ in range(4)]
            expected = sum(values((256,), torch.float32, r + i) for r in range(hvd.size()))
            assert torch.equal(read(hvd.synchronize(handle)), expected)
            assert all(torch.equal(read(tensor), torch.full((256,), -5.0)) for tensor in junk)

    def check_allgather(self):
        self.both(hvd.allgather, values((hvd.rank() + 2, 3), torch.float32, hvd.rank()))
        self.both(hvd.allgather, values((2, 3), torch.int64, hvd.rank()))
        self.both(hvd.allgather, values((2 * hvd.rank(), 3), torch.int64, hvd.rank()))

    def check_broadcast(self):
        for dtype in DTYPES + [torch.bool]:
            host = values((4, 3), dtype, hvd.rank())
            self.both(lambda x: hvd.broadcast(x, hvd.size() - 1), host)
            self.both(lambda x: hvd.broadcast_(x, 0), host)

    def check_alltoall(self):
        host = values((hvd.size() * 2, 3), torch.float32, hvd.rank())
        self.both(hvd.alltoall, host)
        splits = torch.tensor([(hvd.rank() + m) % 3 for m in range(hvd.size())],
                              dtype=torch.int32)
        host = values((int(splits.sum()), 2), torch.float32, hvd.rank())
        self.both(lambda x: hvd.alltoall(x, splits=splits)[0], host)

    def check_reducescatter(self):
        host = values((2 * hvd.size() + 1, 3), torch.float32, hvd.rank())
        self.both(lambda x: hvd.reducescatter(x, op=hvd.Sum), host)

    def check_process_set(self):
        everybody = hvd.add_process_set(list(range(hvd.size() - 1)))
        if hvd.rank() < hvd.size() - 1:
            host = values((5,), torch.float32, hvd.rank())
            self.both(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=everybody), host)
        hvd.remove_process_set(everybody)

    def check_side_stream(self):
        """Made, submitted and awaited on a stream of the user's own."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for i in range(10):
                host = values((128,), torch.float32, hvd.rank() + i)
                self.both(lambda x: hvd.allreduce(x, op=hvd.Sum), host)
                self.both(lambda x: hvd.allgather(x), host)

    def check_waiting_on_another_stream(self):
        side = torch.cuda.Stream()
        for i in range(10):
            host = values((128,), torch.float32, hvd.rank() + i)
            handle = hvd.allreduce_async(made_on_device(host), op=hvd.Sum, name=f"other.{i}")
            with torch.cuda.stream(side):
                result = read(hvd.synchronize(handle))
            expected = sum(values((128,), torch.float32, r + i) for r in range(hvd.size()))
            assert torch.equal(result, expected)

    def check_memory_lives_while_another_stream_waits(self):
        """The stream in which the tensors were made goes on meanwhile, and gets their memory."""
        side = torch.cuda.Stream()
        for i in range(10):
            host = values((256,), torch.float32, hvd.rank() + i)
            handle = hvd.allreduce_async(made_on_device(host), op=hvd.Sum, name=f"beside.{i}")
            with torch.cuda.stream(side):
                result = hvd.synchronize(handle)
            del handle
            junk = [torch.empty(256, device="cuda") for _ in range(64)]  # all that is free
            for tensor in junk:
                tensor.copy_(torch.full((256,), -5.0))
            torch.cuda.current_stream().synchronize()
            expected = sum(values((256,), torch.float32, r + i) for r in range(hvd.size()))
            with torch.cuda.stream(side):
                assert torch.equal(read(result), expected)

    def check_host_and_device_meet(self):
        """A rank may bring its share on the device, and another from the host."""
        host = values((9,), torch.float32, hvd.rank())
        mine = made_on_device(host) if hvd.rank() == 0 else host
        result = hvd.allreduce(mine, op=hvd.Sum, name="mixed")
        assert result.device == mine.device
        expected = sum(values((9,), torch.float32, r) for r in range(hvd.size()))
        assert torch.equal(result.cpu(), expected)

    def check_channels_last(self):
        """Dense, but not in the order of rows; and every other element of a row."""
        host = values((2, 3, 4, 5), torch.float32, hvd.rank())
        self.both(lambda x: hvd.allreduce(x.to(memory_format=torch.channels_last), op=hvd.Sum),
                  host)
        self.both(lambda x: hvd.allreduce(x[:, :, :, ::2], op=hvd.Sum), host)

    def check_complex(self):
        host = torch.complex(values((4, 3), torch.float32, hvd.rank()),
                             values((4, 3), torch.float32, hvd.rank() + 1))
        self.both(lambda x: hvd.allreduce(x, op=hvd.Sum), host)

    def check_sparse(self):
        """Gradients of an embedding, whose rows the ranks do not share."""
        def gathered(words):
            table = torch.nn.Embedding(6, 2, sparse=True)
            with torch.no_grad():
                table.weight.copy_(values((6, 2), torch.float32, 0))
            table.to(words.device)(words).sum().backward()
            handle = hvd.sparse_allreduce_async(table.weight.grad, "sparse", hvd.Average)
            return hvd.synchronize(handle).to_dense()

        self.both(gathered, torch.tensor([hvd.rank(), 3, 3, 5]), exact=False)

    def check_gradients(self):
        """Backward through a collective."""
        def gradient(x):
            x.requires_grad_()
            hvd.allgather(hvd.allreduce(x, op=hvd.Sum)).sum().backward()
            return x.grad

        self.both(gradient, values((3, 2), torch.float32, hvd.rank()))

    def check_sync_batch_norm(self):
        def normalized(x):
            layer = hvd.SyncBatchNorm(3).to(x.device)
            x.requires_grad_()
            y = layer(x)
            (y * y * y).sum().backward()
            return y.detach(), x.grad, layer.running_var

        self.both(normalized, values((4, 3), torch.float32, 3 * hvd.rank()) ** 2, exact=False)

    def check_mixed_precision(self):
        """A GradScaler meets an overflow on one rank: no rank may take the step."""
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 2).cuda()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5),
                                             named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        scaler = torch.cuda.amp.GradScaler(init_scale=8.0)
        moved = []
        for step in range(3):
            before = read(model.weight.detach())
            optimizer.zero_grad()
            inputs = values((3, 4), torch.float32, hvd.rank() + step)
            if step == 1 and hvd.rank() == 0:
                inputs = inputs * float("inf")
            with torch.autocast("cuda"):
                output = model(inputs.cuda())
                assert output.dtype == torch.float16
                loss = output.sum()
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(before, read(model.weight.detach())))
        assert moved == [True, False, True]
        weights = read(hvd.allgather(model.weight.detach().reshape(1, -1)))
        assert all(torch.equal(row, weights[0]) for row in weights)

    def check_compiled(self):
        """A compiled function with collectives in its graph."""
        def function(x):
            return hvd.allreduce(x * 2, op=hvd.Sum, name="compiled") + 1

        compiled = torch.compile(function, backend="aot_eager")
        for i in range(3):
            self.both(compiled, values((8,), torch.float32, hvd.rank() + i))

    def check_join(self):
        if hvd.rank() == 0:
            host = values((6,), torch.float32, 1)
            assert torch.equal(read(hvd.allreduce(made_on_device(host), op=hvd.Sum, name="join")),
                               host)
        assert hvd.join() >= 0


class Gate:
    """While it is closed, what is queued behind it in the current stream does not run."""

    def __init__(self):
        driver, self._c = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
        self._semaphore = ctypes.create_string_buffer(64)
        self._c.sem_init(self._semaphore, 0, 0)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert driver.cuLaunchHostFunc(stream, self._c.sem_wait, self._semaphore) == 0

    def open(self):
        self._c.sem_post(self._semaphore)


class Nothing(torch.optim.Optimizer):
    """All that its step() does is what DistributedOptimizer adds to it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        pass


def run_beside_closed_gate(rounds=20):
    """The device stands still: submissions, hooks, synchronize() and step() return all the same.

    Returns the seconds that each round took.
    """
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    host = values((32,), torch.float32, hvd.rank()).pin_memory()
    parameter = torch.nn.Parameter(torch.zeros(32, device="cuda"))
    optimizer = hvd.DistributedOptimizer(Nothing([parameter]),
                                         named_parameters=[("gate.parameter", parameter)])
    tensor, gradient = torch.empty(32, device="cuda"), torch.empty(32, device="cuda")
    took = []
    for i in range(rounds + 2):
        if i == 2:  # whatever takes memory, or looks at the first gradients, has done so
            torch.cuda.synchronize()
            gate = Gate()
        since = time.monotonic()
        gradient.copy_(host, non_blocking=True)
        tensor.copy_(host, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        parameter.backward(gradient)
        result = hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Sum, name="gate"))
        optimizer.step()
        took.append(time.monotonic() - since)
    assert not torch.cuda.current_stream().query(), "the gate was open"
    gate.open()
    total = sum(values((32,), torch.float32, r) for r in range(hvd.size()))
    assert torch.equal(result.cpu(), total)
    assert torch.equal(parameter.grad.cpu(), total / hvd.size())
    hvd.shutdown()
    return took[2:]


def train(device, steps=3):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(),
                                torch.nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(7)
    inputs, targets = torch.randn(8 * hvd.size(), 4), torch.randn(8 * hvd.size(), 1)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(inputs[hvd.rank()::hvd.size()].to(device))
        target = targets[hvd.rank()::hvd.size()].to(device)
        torch.nn.functional.mse_loss(output, target).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def run():
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    Device().run()
    there, here = train("cuda"), train("cpu")
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(there, here)), (there, here)
    hvd.shutdown()
    return [weights.sum().item() for weights in there]
