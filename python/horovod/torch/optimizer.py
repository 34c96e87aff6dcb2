# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: gradients are reduced over all ranks while the backward pass still runs.

The wrapped optimizer is an instance of a subclass of the user's own class, made on the fly, that
shares the state and the parameter groups of the original. Each parameter has a hook, a C object
(_core.GradientHook) that submits the gradient as soon as it is accumulated; step() waits for all of
them at once and runs the user's step.

What a rank submits for a parameter its own backward pass has not used must match the others, so
ranks agree at the first step which gradients are sparse (_agree_on_sparse). What they exchange then
also shows whether they train one model on different data (self_check.py).

Parameters keep their hooks in a way the garbage collector of Python does not see, so hooks do not
hold the optimizer: it goes when its user lets it go, and takes its hooks along. Only after its
first step, though: whoever goes on with the optimizer that was wrapped is told by the hooks.
"""
import contextlib
import os
import warnings
import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from horovod import _core
from horovod.common.basics import Adasum, Average, Max, size
from horovod.common.exceptions import HorovodInternalError
from horovod.common.objects import broadcast_object
from horovod.common.process_sets import global_process_set
from horovod.common.util import check_adasum, check_op, split_list
from horovod.torch.adapter import DTYPES
from horovod.torch.compression import Compression
from horovod.torch.self_check import FirstStep, warn_of_ddp
from horovod.torch.mpi_ops import (allreduce_async_, era, grouped_allreduce_async_,
                                   sparse_allreduce_async, synchronize)

_attached = WeakIdKeyDictionary()  # parameter -> what takes its hook away again


def _is_elastic():
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def _parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def _add_names(names, optimizer):
    """Gives a name to parameters that have none: all, or those of groups added later."""
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            names.setdefault(p, f"allreduce.noname.{g}.{i}")
    return names


def _check_names(named_parameters, optimizer):
    """parameter -> name, for every parameter of the optimizer."""
    named = list(named_parameters) if named_parameters is not None else None
    if named is None:
        return _add_names({}, optimizer)
    if any(not isinstance(item, tuple) for item in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), "
                         "usually produced by model.named_parameters().")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) \
        if len(set(names)) < len(names) else []
    if twice:
        raise ValueError("Parameter names in named_parameters must be unique. Found duplicates: "
                         + ", ".join(twice))
    by_parameter = {p: name for name, p in named}
    unnamed = [p for p in _parameters(optimizer) if p not in by_parameter]
    if unnamed:
        raise ValueError("named_parameters was specified, but one or more model parameters were "
                         "not named. Python object ids: "
                         + ", ".join(str(id(p)) for p in unnamed))
    return by_parameter


def _check_groups(num_groups, groups):
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning,
                      stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError("groups should be an integer greater than 0, or a list of lists")
        return groups or None
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, (list, tuple))
                                                        for g in groups):
        raise ValueError("groups should be an integer greater than 0, or a list of lists of "
                         "parameters")
    seen = set()
    for group in groups:
        for p in group:
            if not isinstance(p, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor")
            if id(p) in seen:
                raise ValueError("a parameter can only appear once in groups")
            seen.add(id(p))
    return groups


def _no_entries(p, sparse_dim):
    """A sparse gradient of zeros, divided into sparse and dense dimensions like the others."""
    return torch.sparse_coo_tensor(
        torch.empty(sparse_dim, 0, dtype=torch.int64, device=p.device),
        torch.empty(0, *p.shape[sparse_dim:], dtype=p.dtype, device=p.device), p.shape,
        check_invariants=False)


class _Group:
    """Gradients that are reduced together, once all are there.

    Members that are frozen meanwhile are left out: where only some ranks have frozen them, the
    core refuses the groups of different lengths.
    """

    def __init__(self, name, parameters):
        self.name = name
        self.parameters = parameters
        self.start_step()

    def start_step(self):
        self.ready = set()  # and not submitted yet
        self.n_awaited = sum(p.requires_grad for p in self.parameters)
        self.submitted, self.handle, self._results = [], None, None

    def is_complete(self):
        # The count nearly always says no; some may have been unfrozen since it was made.
        return len(self.ready) >= self.n_awaited and all(
            p in self.ready or not p.requires_grad for p in self.parameters)

    def remove(self, p):
        self.parameters = [member for member in self.parameters if member is not p]
        self.n_awaited -= 1

    def wait_for(self, p):
        """The reduced gradient of a member."""
        if self.handle is None:
            raise RuntimeError(f"{self.name} was never submitted: the gradients of its parameters "
                               "are those of this rank only")
        if self._results is None:
            self._results = dict(zip(self.submitted, self.handle.wait()))
        return self._results[p]


def _held_by(holder, method):
    """The bound method, as a function that keeps its object alive only if the holder does."""
    reference = weakref.WeakMethod(method)

    def call(*args):
        return reference()(*args)

    call.holder = holder
    return call


def is_distributed(optimizer):
    """Is it one, or does one reduce the gradients of its parameters?"""
    return isinstance(optimizer, _Wrapper) or any(p in _attached for p in _parameters(optimizer))


def _remove_all(handles):
    for handle in handles:
        handle.remove()


class _Wrapper:
    """What all wrapped optimizers share."""

    _gradients = None  # KeptGradients, of elastic/finish.py: a step is finished after a failure
    step_watch = None  # told when weights are about to change and when they have (elastic/steps.py)

    def _apply(self, apply):
        if self.step_watch is None:
            return apply()
        self.step_watch.begin()
        result = apply()
        self.step_watch.end()
        return result

    def __reduce_ex__(self, _protocol):  # also of copy.copy() and copy.deepcopy()
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: hooks of its parameters and "
            "operations in flight belong to it. Save its state_dict(), or copy the optimizer it "
            "was made of and wrap the copy.")


class _DistributedOptimizer(_Wrapper):
    """Mixed into a subclass of the user's optimizer; see DistributedOptimizer()."""

    def _begin(self, names, compression, backward_passes_per_step, op, gradient_predivide_factor,
               groups, sparse_as_dense, process_set):
        self._parameter_names = names
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._prescale = 1.0 / gradient_predivide_factor
        self._postscale = gradient_predivide_factor
        self._hooks = {}  # parameter -> GradientHook
        self._after = {}  # parameter -> what to do with the result, for the slow ways
        self._sparse = {}  # parameter -> sparse dimensions, where gradients are sparse
        self._agreed = set()  # parameters of which all ranks know whether they are in _sparse,
        self._agreed_in = era()  # in this era
        self._agreement = None  # on its way: parameters, handle
        self._first_step = FirstStep(process_set)
        self._groups = {}  # parameter -> _Group
        self._synchronized = False
        self._should_synchronize = True
        is_member = process_set.included() is not False
        self._is_active = is_member and (process_set.size() > 1 or _is_elastic())
        self._holder = [self]  # until the first step
        self._hook_handles = []  # what takes the hooks away again
        weakref.finalize(self, _remove_all, self._hook_handles).atexit = False
        if self._is_active:
            self._make_groups(groups)
            self._make_hooks()

    # --- Hooks ---

    def _make_groups(self, groups):
        if groups is None:
            return
        if isinstance(groups, int):
            order = [self._parameter_names[p] for p in _parameters(self) if p.requires_grad]
            if not _is_elastic():  # there, the others have their groups when a new rank comes
                # The order of rank 0 counts: ranks may have built their models differently.
                order = broadcast_object(order, self.process_set.ranks[0], "gradient_groups",
                                         self.process_set)
            by_name = {name: p for p, name in self._parameter_names.items()}
            groups = split_list([by_name[name] for name in order], groups)
        trainable = {p for p in _parameters(self) if p.requires_grad}
        for parameters in groups:
            members = [p for p in parameters if p in trainable]
            if members:  # the first one's name makes it different from groups of other optimizers
                group = _Group(f"group.{self._parameter_names[members[0]]}", members)
                self._groups.update((p, group) for p in members)

    def _make_hooks(self):
        """For parameters that have none yet: all, or those added or unfrozen since."""
        new = [p for p in _parameters(self) if p.requires_grad and p not in self._hooks]
        if new:
            _add_names(self._parameter_names, self)
        for p in new:
            self._hooks[p] = self._make_hook(p, self._parameter_names[p])
            if p in _attached:  # of an optimizer this one replaces: one gradient, one hook
                _attached[p].remove()
            _attached[p] = p.register_post_accumulate_grad_hook(self._hooks[p])
            self._hook_handles.append(_attached[p])

    def _make_hook(self, p, name):
        # Slow at the first step: _submit_slowly() tells when the last gradient has come.
        return _core.GradientHook(
            parameter=name, torch_dtype=p.dtype, strided=torch.strided,
            slow=_held_by(self._holder, self._submit_slowly), always_slow=True,
            passes=self.backward_passes_per_step, name=f"allreduce.{name}",
            dtype=DTYPES.get(p.dtype, 0), reduce=self.op, process_set=self.process_set,
            prescale=self._prescale, postscale=self._postscale)

    def _is_always_slow(self, p):
        return (self._gradients is not None or self._compression is not Compression.none
                or p in self._groups
                or p.dtype not in DTYPES or (p in self._sparse and not self.sparse_as_dense))

    def keep_gradients(self, gradients):
        """Keeps gradients as they were computed, so that a step can be finished after a failure."""
        self._gradients = gradients
        for hook in self._hooks.values():
            hook.always_slow = True

    def _submit_slowly(self, hook, p):
        """Everything that is not the allreduce of a plain gradient in place; returns a handle."""
        if self._gradients is None:
            return self._submit_now(hook, p)
        self._gradients.keep(p)
        try:
            return self._submit_now(hook, p)
        except HorovodInternalError:
            hook.handle = None  # synchronize() meets the failure again, and knows what to do
            return None

    def _submit_now(self, hook, p):
        self._notice_a_new_era()
        if p not in self._agreed:
            self._first_step.note_gradient(p)
        hook.handle = self._submit_its_way(hook, p)
        if len(self._agreed) < len(self._hooks) and self._agreement is None \
                and self._has_all_gradients():
            # Not to begin with it in synchronize(): ranks may come to other optimizers' first.
            self._start_agreement()
        return hook.handle

    def _has_all_gradients(self):
        n_hooks = len(self._hooks)
        if any(hook.handle is None for hook in self._hooks.values()):
            return False
        self._make_hooks()
        return len(self._hooks) == n_hooks

    def _submit_its_way(self, hook, p):
        grad = p.grad
        if grad.is_sparse and p not in self._agreed:
            self._sparse[p] = grad.sparse_dim()  # as on the other ranks, unless they disagree
        if p in self._sparse and not self.sparse_as_dense:
            return self._submit_sparse(hook.parameter, p, grad)
        if grad.is_sparse:
            grad = grad.to_dense()
            self._after[p] = lambda result: setattr(p, "grad", self._like_the_others(p, result))
        if p in self._groups:
            return self._submit_with_group(self._groups[p], p)
        return self._submit_one(hook.parameter, p, grad)

    def _submit_sparse(self, name, p, grad):
        self._leave_group(p)
        if not grad.is_sparse:  # on this rank, this time
            grad = grad.to_sparse(self._sparse[p])
        self._after[p] = lambda result: setattr(p, "grad", result)
        return _Wait(sparse_allreduce_async(grad, name, self.op, self.process_set))

    def _like_the_others(self, p, result):
        """Sparse if it is on all ranks: a step with a dense one would round differently."""
        return result.to_sparse() if p in self._sparse else result

    def _leave_group(self, p):
        """A sparse gradient travels by itself: its group is one of the others, on all ranks."""
        group = self._groups.pop(p, None)
        if group is not None:
            group.remove(p)
            if group.ready and group.is_complete():
                self._submit_group(group)

    def _submit_one(self, name, p, grad):
        wire, ctx = self._compression.compress(grad)
        handle = allreduce_async_(wire, name=name, op=self.op, prescale_factor=self._prescale,
                                  postscale_factor=self._postscale, process_set=self.process_set)
        self._write_back_later(p, grad, wire, ctx)
        return handle

    def _write_back_later(self, p, grad, wire, ctx):
        if ctx is None and wire is grad:
            return
        then = self._after.get(p)

        def write(result):
            value = self._compression.decompress(result, ctx)
            return then(value) if then is not None else grad.copy_(value)

        self._after[p] = write

    def _submit_with_group(self, group, p):
        group.ready.add(p)
        if group.is_complete():
            self._submit_group(group)
        return _Wait(lambda: group.wait_for(p))

    def _submit_group(self, group):
        """One grouped allreduce of the members that are ready, in an order all ranks share."""
        group.submitted = [p for p in group.parameters if p in group.ready]
        group.ready = set()
        grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in group.submitted]
        wires, contexts = zip(*(self._compression.compress(grad) for grad in grads))
        group.handle = grouped_allreduce_async_(wires, name=group.name, op=self.op,
                                                prescale_factor=self._prescale,
                                                postscale_factor=self._postscale,
                                                process_set=self.process_set)
        for p, grad, wire, ctx in zip(group.submitted, grads, wires, contexts):
            self._write_back_later(p, grad, wire, ctx)

    # --- Waiting ---

    def _agree_on_sparse(self):
        """Ranks learn from those that have used a parameter whether its gradients are sparse.

        Once for each parameter: one that no rank has used by then counts as dense for good.
        """
        self._notice_a_new_era()
        while len(self._agreed) < len(self._hooks):
            if self._agreement is None:
                self._start_agreement()
            (new, handle), self._agreement = self._agreement, None
            rows = dict(zip(new, synchronize(handle).tolist()))
            for p, (sparse_dim, is_dense, *_) in rows.items():
                if sparse_dim:
                    self._has_sparse_gradients(p, sparse_dim, is_dense)
                self._hooks[p].always_slow = self._is_always_slow(p)
            self._agreed.update(new)
            self._first_step.look_at([(self._parameter_names[p], rows[p][2:])
                                      for p in self._hooks if p in rows])

    def _notice_a_new_era(self):
        if self._agreed_in != era():
            self._agreed.clear()
            self._agreed_in = era()
            self._agreement = None

    def _start_agreement(self):
        new = [p for p in self._hooks if p not in self._agreed]
        new.sort(key=self._parameter_names.get)  # ranks may have built their models differently
        seen = torch.tensor([[*self._seen(p), *self._first_step.row(p)] for p in new],
                            dtype=torch.uint8)
        name = f"sparse_gradients.{self._parameter_names[new[0]]}"
        self._agreement = new, allreduce_async_(seen, name=name, op=Max,
                                                process_set=self.process_set)

    def _seen(self, p):
        """Sparse dimensions of the parameter's gradients, and: has a dense one been submitted?"""
        hook = self._hooks[p]
        if p in self._sparse:
            return self._sparse[p], False
        if hook.handle is None:
            return p.grad.sparse_dim() if p.grad is not None and p.grad.is_sparse else 0, False
        return 0, True

    def _has_sparse_gradients(self, p, sparse_dim, is_dense):
        self._sparse[p] = sparse_dim
        if self.sparse_as_dense:
            return
        if is_dense:
            raise HorovodInternalError(
                f"The gradient of parameter '{self._hooks[p].parameter}' is sparse on some ranks "
                "and dense on others. Make the layer that uses it the same on all, or give "
                "DistributedOptimizer sparse_as_dense=True.")
        self._leave_group(p)

    def _submit_missing(self):
        """What no backward pass has brought: zeros, so that ranks with other graphs do not wait."""
        self._make_hooks()
        self._agree_on_sparse()
        for p, hook in self._hooks.items():
            if hook.handle is not None or not p.requires_grad:
                continue
            if p.grad is None:
                p.grad = (_no_entries(p, self._sparse[p]) if p in self._sparse
                          else torch.zeros_like(p))
            hook.left = 1
            hook(p)
        for group in set(self._groups.values()):
            if group.ready:  # it waits for members that were frozen since the last step
                self._submit_group(group)

    def synchronize(self):
        """Waits until all gradients are reduced and in place."""
        if self._is_active:
            while not self._reduce_all():
                self._gradients.put_back(self._hooks)
            self._holder.clear()
        self._synchronized = True

    def _reduce_all(self):
        """False: a rank was lost, and the gradients are to be put back and reduced once more."""
        try:
            self._submit_missing()
            self._wait_for_all()
        except HorovodInternalError:
            if self._gradients is None:
                raise
            return False
        finally:
            self._forget()
        if self._gradients is not None:
            self._gradients.forget()
        return True

    def _wait_for_all(self):
        plain, others = [], []
        for p, hook in self._hooks.items():
            if hook.handle is not None:
                ours = type(hook.handle) is _core.Handle
                (plain if ours else others).append((p, hook.handle))
        results = _core.wait_all([handle for _, handle in plain])
        if not others and not self._after:
            return
        results = list(zip((p for p, _ in plain), results))
        results += [(p, synchronize(handle)) for p, handle in others]
        with torch.no_grad():
            for p, result in results:
                after = self._after.pop(p, None)
                if after is not None:
                    after(result)

    def _is_in_flight(self):
        return any(hook.handle is not None for hook in self._hooks.values())

    def _forget(self):
        for hook in self._hooks.values():
            hook.handle = None
            hook.left = hook.passes
        for group in set(self._groups.values()):
            group.start_step()
        self._after.clear()
        self._agreement = None

    # --- What users call ---

    def set_backward_passes_per_step(self, passes):
        """How many backward passes make a step from now on."""
        self.backward_passes_per_step = passes
        for hook in self._hooks.values():
            hook.passes = hook.left = passes

    def load_state_dict(self, *args, **kwargs):
        """Also forgets gradients that are on their way, but not before they have arrived.

        Their names are taken until then.
        """
        self.drop_gradients()
        return super().load_state_dict(*args, **kwargs)

    def drop_gradients(self):
        """Forgets gradients that are on their way, once they have arrived or failed."""
        if self._is_in_flight():
            # Elastic training restores after a failure; nothing arrives then.
            gradients, self._gradients = self._gradients, None
            with contextlib.suppress(RuntimeError, ValueError):
                self.synchronize()
            self._gradients = gradients
        self._forget()
        self._synchronized = False

    @contextlib.contextmanager
    def skip_synchronize(self):
        """For step() after synchronize(): with optimizer.skip_synchronize(): optimizer.step()"""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def _reducing(self, closure):
        """The closure, with the gradients it computes reduced each time it has."""
        def evaluate():
            self._synchronized = False
            loss = closure()
            if not self._synchronized:
                self.synchronize()
            return loss

        return evaluate

    def step(self, closure=None):
        """Waits for the gradients and makes the step of the user's optimizer."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.", stacklevel=2)
            if closure is None:
                self.synchronize()
            else:
                closure = self._reducing(closure)
        try:
            step = super().step
            return self._apply(step if closure is None else lambda: step(closure))
        finally:
            self._synchronized = False

    def zero_grad(self, *args, **kwargs):
        """As the user's optimizer does, once no gradient is on its way."""
        if self._is_in_flight():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition.")
        return super().zero_grad(*args, **kwargs)


class _Wait:
    """A function as a handle."""

    def __init__(self, wait):
        self.wait = wait


class _AdasumOptimizer(_Wrapper):
    """Each rank makes its own step; the changes are combined by Adasum.

    Mixed into a subclass of the user's optimizer, for op=Adasum on more than one rank.
    """

    def _begin(self, names, compression, backward_passes_per_step, **_):
        self._parameter_names = names
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step

    def set_backward_passes_per_step(self, passes):
        """How many backward passes make a step from now on."""
        self.backward_passes_per_step = passes

    def synchronize(self):
        """Nothing to wait for: communication happens in step()."""

    @contextlib.contextmanager
    def skip_synchronize(self):
        """Has no meaning here."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum "
                             "optimizer.")
        yield

    def step(self, closure=None):
        """The user's step, then the Adasum of what it changed."""
        step = super().step
        return self._apply(lambda: self._step_together(step, closure))

    def _step_together(self, step, closure):
        loss = closure() if closure is not None else None
        _add_names(self._parameter_names, self)
        parameters = [p for p in _parameters(self) if p.requires_grad]
        starts = [p.detach().clone() for p in parameters]
        step()
        with torch.no_grad():
            sent = []
            for p, start in zip(parameters, starts):
                wire, ctx = self._compression.compress(p - start)
                handle = allreduce_async_(wire, name=self._parameter_names[p], op=Adasum)
                sent.append((handle, ctx))
            for p, start, (handle, ctx) in zip(parameters, starts, sent):
                delta = self._compression.decompress(synchronize(handle), ctx)
                p.copy_(start + delta)
        return loss


def DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none,
                         backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0,
                         num_groups=0, groups=None, sparse_as_dense=False,
                         process_set=global_process_set):
    """An optimizer that reduces gradients over all ranks before each step.

    named_parameters: names for messages and matching, usually model.named_parameters().
    compression: what gradients travel as. backward_passes_per_step: gradients of so many backward
    passes are summed before they are reduced. op: Average, Sum or Adasum.
    gradient_predivide_factor: splits the averaging into a division before and one after the sum.
    groups: number of groups, or lists of parameters, whose gradients are reduced together.
    sparse_as_dense: sparse gradients are reduced as dense ones. process_set: the ranks that reduce.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if isinstance(optimizer, _Wrapper):
        raise ValueError("the optimizer is a DistributedOptimizer already: use it as it is, or "
                         "wrap the one it was made of once more, with other arguments")
    if not hasattr(optimizer, "param_groups"):
        kind = type(optimizer)
        raise TypeError(f"horovod.torch takes optimizers of PyTorch, not {kind.__module__}."
                        f"{kind.__qualname__}; those of Keras go to horovod.keras or "
                        "horovod.tensorflow.keras")
    groups = _check_groups(num_groups, groups)
    names = _check_names(named_parameters, optimizer)
    warn_of_ddp(names.values())
    check_adasum(check_op(op), process_set, size())
    if process_set.process_set_id is None:
        raise ValueError("Process set provided does not exist, or has not been registered.")
    mixin = _AdasumOptimizer if op == Adasum and size() > 1 else _DistributedOptimizer
    base = type(optimizer)
    cls = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    distributed = cls.__new__(cls)
    # Shares parameter groups and state, so schedulers of the original keep working. A scheduler
    # has put a step() of its own on the instance, which would hide ours.
    distributed.__dict__.update({name: value for name, value in optimizer.__dict__.items()
                                 if name not in ("step", "zero_grad")})
    distributed._begin(names=names, compression=compression,
                       backward_passes_per_step=backward_passes_per_step, op=op,
                       gradient_predivide_factor=gradient_predivide_factor, groups=groups,
                       sparse_as_dense=sparse_as_dense, process_set=process_set)
    return distributed
