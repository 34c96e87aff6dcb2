# SPDX-License-Identifier: Apache-2.0
"""What programs rely on without saying so: the bits of scaled sums, and mistakes that are told."""
import concurrent.futures
import functools
import threading
import time
import warnings

import numpy as np
import pytest
import torch

import horovod.torch as hvd
from ranks import run_ranks

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FACTORS = [0.1, 1 / 3, 3.7, -0.3, 1e-3]
SIZES = [7, 3000, 200_000]  # on the board or riding, one slice, many

# --- Bits of scaled sums --------------------------------------------------------------------------


def _values(rank, dtype, n, trial):
    generator = torch.Generator().manual_seed(1000 * trial + rank)
    if dtype.is_floating_point:
        return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)
    top = 40 if dtype in (torch.uint8, torch.int8) else 10_000
    return torch.randint(0, top, (n,), generator=generator).to(dtype)


def _times(tensor, factor):
    """The framework's product; of integers in double, as PyTorch would give a float32."""
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.double() * factor).trunc().to(tensor.dtype)


def _sum(tensors):
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _over(total, n):
    return total / n if total.dtype.is_floating_point else (total.double() / n).trunc().to(
        total.dtype)


def _check(what, got, want):
    same = torch.equal(got, want)
    assert same, (what, got.dtype, (got != want).sum(), got[got != want][:3], want[got != want][:3])


def scaled_sums(dtypes, factors):
    hvd.init()
    members, me = hvd.size(), hvd.rank()
    for trial, (dtype, n) in enumerate((dtype, n) for dtype in dtypes for n in SIZES):
        every = [_values(rank, dtype, n, trial) for rank in range(members)]
        mine, total = every[me], _sum(every)
        rows = n // members + (me < n % members)
        start = sum(n // members + (rank < n % members) for rank in range(me))
        for f in factors:
            if dtype is torch.uint8 and f < 0:
                continue
            after, before = _times(total, f), _sum([_times(one, f) for one in every])
            averaged = _over(total, members)
            name = f"{dtype}.{n}"  # twice: the second time it may meet on the board
            for _ in range(2):
                _check("sum", hvd.allreduce(mine, op=hvd.Sum, postscale_factor=f, name=name), after)
            _check("async", hvd.synchronize(hvd.allreduce_async(
                mine, op=hvd.Sum, postscale_factor=f)), after)
            _check("before", hvd.allreduce(mine, op=hvd.Sum, prescale_factor=f), before)
            _check("both", hvd.allreduce(mine, op=hvd.Sum, prescale_factor=f, postscale_factor=0.7),
                   _times(before, 0.7))
            _check("scatter", hvd.reducescatter(mine, op=hvd.Sum, postscale_factor=f),
                   after[start:start + rows])
            _check("scatter before", hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=f),
                   before[start:start + rows])
            for one in hvd.grouped_allreduce([mine, mine.clone()], op=hvd.Sum, postscale_factor=f):
                _check("grouped", one, after)
            for one in hvd.grouped_reducescatter([mine, mine.clone()], op=hvd.Sum,
                                                 postscale_factor=f):
                _check("grouped scatter", one, after[start:start + rows])
            _check("average", hvd.allreduce(mine), averaged)
            if dtype.is_floating_point and members == 2:
                _check("scaled average", hvd.allreduce(mine, postscale_factor=f),
                       _times(averaged, f))
        hvd.allreduce(mine, op=hvd.Max, postscale_factor=0.5)


@pytest.mark.parametrize("size, hosts, dtypes, env", [
    (2, 1, FLOATS + INTEGERS, {}),
    (2, 2, FLOATS + INTEGERS, {}),
    (2, 1, FLOATS, {"HOROVOD_TRANSPORTS": "tcp", "HOROVOD_INLINE_BYTES": "0"}),
    (3, 1, INTEGERS, {}),
    (3, 2, INTEGERS, {}),  # two levels
    (1, 1, FLOATS + INTEGERS, {}),
], ids=["one_host", "two_hosts", "tcp", "three_ranks", "two_levels", "alone"])
def test_scaled_sums_have_the_frameworks_bits(size, hosts, dtypes, env):
    factors = FACTORS if size == 2 else FACTORS[:2]
    run_ranks(size, "torch/test_semantics", "scaled_sums", dtypes, factors, hosts=hosts, env=env)


def averages_of_halves():
    """Against NumPy: added in float32, divided there, rounded once. The values are such that no sum
    in float32 depends on its order."""
    hvd.init()
    members, me = hvd.size(), hvd.rank()
    for dtype, quantum in ((torch.float16, 2**-9), (torch.bfloat16, 2**-6)):
        for n in SIZES:
            every = np.random.default_rng(n).integers(-2000, 2000, (members, n))
            every = [torch.from_numpy(one * np.float32(quantum)).to(dtype) for one in every]
            total = sum(one.float().numpy().astype(np.float64) for one in every)
            want = torch.from_numpy((total / members).astype(np.float32)).to(dtype)
            rows = n // members + (me < n % members)
            start = sum(n // members + (rank < n % members) for rank in range(me))
            for _ in range(3):  # agreed, and on the board
                _check("average", hvd.allreduce(every[me], name=f"{dtype}.{n}"), want)
            _check("scatter", hvd.reducescatter(every[me]), want[start:start + rows])
            for one in hvd.grouped_allreduce([every[me], every[me].clone()]):
                _check("grouped", one, want)


@pytest.mark.parametrize("size, hosts, env", [
    (2, 1, {}), (3, 1, {}), (4, 1, {}), (3, 2, {}), (4, 2, {}),
    (3, 1, {"HOROVOD_TRANSPORTS": "tcp", "HOROVOD_INLINE_BYTES": "0"}),
], ids=["two", "three", "four", "three_on_two_hosts", "four_on_two_hosts", "three_by_tcp"])
def test_averages_of_halves_are_rounded_once(size, hosts, env):
    run_ranks(size, "torch/test_semantics", "averages_of_halves", hosts=hosts, env=env)


# --- What does not exist --------------------------------------------------------------------------


def adasum_of_a_reducescatter():
    hvd.init()
    errors = []
    for dtype in FLOATS + INTEGERS:
        for function in (hvd.reducescatter,
                         lambda x, op: hvd.grouped_reducescatter([x], op=op)):
            try:
                function(torch.ones(4, dtype=dtype), op=hvd.Adasum)
            except Exception as error:  # whichever it is, it is the same for all
                errors.append((type(error), str(error)))
            else:
                errors.append(None)
    hvd.barrier()  # a rank that has left ends the job of one that is slower
    return errors


def test_adasum_of_a_reducescatter_fails_alike_for_every_type():
    errors = run_ranks(2, "torch/test_semantics", "adasum_of_a_reducescatter")[0]
    assert len(set(errors)) == 1, errors
    assert issubclass(errors[0][0], hvd.HorovodInternalError)
    assert "only supports AVERAGE and SUM" in errors[0][1]


# --- Tensors without a name, and threads ----------------------------------------------------------


def _race(works):
    """Runs each in a thread of its own, late ones on other ranks first: (wrong sums, refusals)."""
    wrong, refused = [], []

    def call(work, which):
        for i in range(200):
            value = torch.full((5,), float(which * 1000 + i))
            try:
                if work(value)[0] != 2 * value[0]:
                    wrong.append((which, i))
            except ValueError as error:
                refused.append(str(error))
                return
            except hvd.HorovodInternalError:  # another rank has given up
                return

    targets = [functools.partial(call, work, which) for which, work in enumerate(works)]
    return wrong, refused, targets


def _join(threads):
    for thread in threads:
        thread.start()
        if hvd.rank() == 0:
            thread.join(0.001)
    for thread in threads:
        thread.join(20)


def threads_of_one_function():
    hvd.init()
    wrong, refused, targets = _race([lambda value: hvd.allreduce(value, op=hvd.Sum)] * 3)
    _join([threading.Thread(target=target) for target in targets])
    hvd.shutdown()
    return wrong, refused


def pool_of_threads():
    hvd.init()
    wrong, refused, targets = _race([lambda value: hvd.allreduce(value, op=hvd.Sum)] * 3)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for target in targets:
            pool.submit(target)
        time.sleep(1)
        hvd.shutdown()
    return wrong, refused


@pytest.mark.parametrize("how", ["threads_of_one_function", "pool_of_threads"])
def test_threads_that_cannot_be_told_apart_must_name_their_tensors(how):
    told = run_ranks(2, "torch/test_semantics", how)
    assert all(wrong == [] for wrong, _ in told), told
    assert any(refused for _, refused in told)
    for text in [text for _, refused in told for text in refused]:
        assert "pass a name that is equal on all ranks" in text and "order of the calls" in text


def threads_of_their_own_functions():
    """They race, and the first rank has more threads, so the names of threads differ."""
    hvd.init()
    wrong = []

    def sums(which):
        for i in range(200):
            value = torch.full((5,), float(which * 1000 + i))
            if hvd.allreduce(value, op=hvd.Sum)[0] != 2 * value[0] \
                    or hvd.allreduce_(value.clone(), op=hvd.Sum)[0] != 2 * value[0]:
                wrong.append((which, i))

    def first():
        sums(1)

    def second():
        sums(2)

    class Third(threading.Thread):
        def run(self):
            sums(3)

    if hvd.rank() == 0:
        threading.Thread(target=time.sleep, args=(0.1,)).start()
    others = [threading.Thread(target=first), threading.Thread(target=second), Third()]
    for thread in others if hvd.rank() == 0 else others[::-1]:
        thread.start()
    sums(0)
    for thread in others:
        thread.join()
    return wrong


def test_threads_of_their_own_functions_are_matched():
    assert run_ranks(2, "torch/test_semantics", "threads_of_their_own_functions") == [[], []]


def one_thread_at_a_time():
    """Threads one after the other, as programs have them that train in a thread, or in a pool of
    one thread beside pools that load data; joined before the next."""
    hvd.init()
    results = []

    def work(value):
        results.append(hvd.allreduce(torch.full((2,), float(value)), op=hvd.Sum).tolist())

    loaders = concurrent.futures.ThreadPoolExecutor(3 if hvd.rank() == 0 else 1)
    list(loaders.map(time.sleep, [0.05] * 3))
    work(1)
    for value in (2, 3):
        thread = threading.Thread(target=work, args=(value,))
        thread.start()
        thread.join()
    work(4)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(work, 5).result()
        pool.submit(work, 6).result()
    work(7)
    loaders.shutdown()
    return results


def test_one_thread_at_a_time_works_as_it_did():
    wanted = [[2.0 * value] * 2 for value in range(1, 8)]
    assert run_ranks(2, "torch/test_semantics", "one_thread_at_a_time") == [wanted, wanted]


def names_from_any_thread():
    hvd.init()
    hvd.allreduce(torch.ones(1))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda i: hvd.allreduce(torch.full((3,), float(i)), op=hvd.Sum,
                                                     name=f"named.{i}").tolist(), range(40)))


def test_names_from_any_thread():
    for named in run_ranks(2, "torch/test_semantics", "names_from_any_thread"):
        assert named == [[2.0 * i] * 3 for i in range(40)]


def backward_in_a_thread_of_autograd():
    """As on a GPU: a native thread runs backward() while the main one waits; with a user's hook."""
    import ctypes

    hvd.init()
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: hvd.allreduce(grad * (hvd.rank() + 1), op=hvd.Sum))
    y = hvd.allreduce(x * (hvd.rank() + 1), op=hvd.Sum).sum()
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: y.backward())
    libc = ctypes.CDLL(None)
    for _ in range(2):  # threads of two passes
        x.grad = None
        y = hvd.allreduce(x * (hvd.rank() + 1), op=hvd.Sum).sum()
        thread = ctypes.c_ulong()
        assert libc.pthread_create(ctypes.byref(thread), None, function, None) == 0
        assert libc.pthread_join(thread, None) == 0
        hvd.allreduce(torch.ones(3))
    return x.grad.tolist()


def test_backward_in_a_thread_of_its_own():
    # Each rank's gradient is 2 * (rank + 1); the hook adds up rank + 1 times that.
    grads = run_ranks(2, "torch/test_semantics", "backward_in_a_thread_of_autograd")
    assert grads == [[2.0 * 1 + 4.0 * 2] * 3] * 2


def groups_of_torch_distributed():
    """A group has one order, whichever thread goes on with it."""
    import torch.distributed as dist

    import horovod.torch.c10d  # noqa: F401 - the backend

    hvd.init()
    dist.init_process_group("hvd")
    results = []

    def work(value):
        tensor = torch.full((2,), float(value))
        dist.all_reduce(tensor)
        results.append(tensor.tolist())

    work(1)
    if hvd.rank() == 0:
        work(2)
    else:
        thread = threading.Thread(target=work, args=(2,))
        thread.start()
        thread.join()
    work(3)
    dist.destroy_process_group()
    return results


def test_groups_of_torch_distributed_keep_their_own_order():
    wanted = [[2.0 * value] * 2 for value in range(1, 4)]
    assert run_ranks(2, "torch/test_semantics", "groups_of_torch_distributed") == [wanted, wanted]


def other_order():
    hvd.init()
    hvd.allreduce(torch.ones(2), name="first")
    try:
        hvd.allreduce(torch.ones(3 + hvd.rank()))
    except hvd.HorovodInternalError as error:
        return str(error)
    return ""


def test_a_mismatch_without_a_name_explains_the_order():
    for text in run_ranks(2, "torch/test_semantics", "other_order"):
        assert "Mismatched" in text and "by the order of their calls" in text


# --- Training that looks right and is not ---------------------------------------------------------


def train(broadcast=True, same_data=False, wrap=True, zero=False, by_hand=False, steps=3,
          layers=(8, 4, 1), passes=1):
    """The warnings of a small training on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.init()
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in zip(layers, layers[1:])])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if broadcast:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if wrap:
            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), backward_passes_per_step=passes)
        generator = torch.Generator().manual_seed(0 if same_data else hvd.rank())
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(passes):
                loss = model(torch.randn(6, layers[0], generator=generator)).pow(2).mean()
                (loss * (0 if zero else 1)).backward()
            if by_hand:
                for name, p in model.named_parameters():
                    hvd.allreduce_(p.grad, name=name)
            optimizer.step()
    told = [one for one in caught if "HOROVOD_TRAINING_CHECKS" in str(one.message)]
    assert {one.filename for one in told} <= {__file__}, "the line shown is the program's"
    return [str(one.message) for one in told]


CASES = {
    "right": ({}, None),
    "passes": ({"passes": 2}, None),
    "no_broadcast": ({"broadcast": False}, "broadcast_parameters() is missing"),
    "first_name": ({"broadcast": False}, "parameter '0.weight' and of 3 others"),
    "one_more_name": ({"broadcast": False, "layers": (1, 1)},
                      "parameter '0.weight' and of 1 other differ"),
    "same_data": ({"same_data": True}, "DistributedSampler"),
    "zero_gradients": ({"zero": True}, None),
    "tiny": ({"same_data": True, "layers": (1, 1)}, None),
    "ordinary": ({"wrap": False}, "Wrap the optimizer in hvd.DistributedOptimizer()"),
    "one_step": ({"wrap": False, "steps": 1}, "SGD.step() was called in a job of 2 ranks"),
    "by_hand": ({"wrap": False, "by_hand": True}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_training_mistakes(case):
    how, words = CASES[case]
    told = run_ranks(2, "torch/test_semantics", "train_as", how)
    assert told[1] == [], told
    assert len(told[0]) == (words is not None), told
    assert words is None or words in told[0][0], told


def train_as(how):
    return train(**how)


@pytest.mark.parametrize("case", ["no_broadcast", "same_data", "ordinary"])
def test_training_checks_can_be_turned_off(case):
    told = run_ranks(2, "torch/test_semantics", "train_as", CASES[case][0],
                     env={"HOROVOD_TRAINING_CHECKS": "0"})
    assert told == [[], []]


def two_networks():
    """Like a GAN: two optimizers, both distributed, and a scheduler."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.init()
        torch.manual_seed(0)
        nets = [torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)]
        optimizers = [hvd.DistributedOptimizer(
            torch.optim.Adam(net.parameters()),
            [(f"{i}.{name}", p) for name, p in net.named_parameters()])
            for i, net in enumerate(nets)]
        torch.manual_seed(hvd.rank() + 1)
        for _ in range(3):
            for net, optimizer in zip(nets, optimizers):
                optimizer.zero_grad()
                net(torch.randn(5, 6)).pow(2).mean().backward()
                optimizer.step()
    return [str(one.message) for one in caught if "HOROVOD_" in str(one.message)]


def test_two_distributed_optimizers_are_right():
    assert run_ranks(2, "torch/test_semantics", "two_networks") == [[], []]


def twice_reduced():
    import torch.distributed as dist

    import horovod.torch.c10d  # noqa: F401 - the backend

    told = []
    hvd.init()
    dist.init_process_group("hvd")
    net = torch.nn.Linear(6, 3)
    for model in (net, torch.nn.parallel.DistributedDataParallel(net)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1),
                                     model.named_parameters())
        told.append(["reduced twice" in str(one.message) for one in caught])
    dist.destroy_process_group()
    return told


def test_a_ddp_model_is_told_from_others():
    assert run_ranks(2, "torch/test_semantics", "twice_reduced") == [[[], [True]], [[], []]]


def test_an_optimizer_of_another_framework():
    class Adam:
        pass

    with pytest.raises(TypeError, match="takes optimizers of PyTorch, not .*Adam; .*horovod.keras"):
        hvd.DistributedOptimizer(Adam())


def uneven_steps():
    """One rank has less data and joins; the check neither waits for it nor counts it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.init()
        torch.manual_seed(0)
        net = torch.nn.Linear(6, 3)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1),
                                             net.named_parameters())
        for _ in range(0 if hvd.rank() == 1 else 3):
            optimizer.zero_grad()
            net(torch.randn(5, 6)).pow(2).mean().backward()
            optimizer.step()
        hvd.join()
    return [str(one.message) for one in caught if "HOROVOD_" in str(one.message)]


def test_ranks_without_data_join():
    assert run_ranks(2, "torch/test_semantics", "uneven_steps") == [[], []]
