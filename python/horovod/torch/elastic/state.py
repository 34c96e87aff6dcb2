# SPDX-License-Identifier: Apache-2.0
"""TorchState: models, optimizers and samplers that survive a change of the ranks."""
import copy

import torch

from horovod.common.basics import rank
from horovod.common.elastic import ObjectState, StepIsLost, meet
from horovod.common.objects import broadcast_object
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.finish import can_finish, finish_steps_of
from horovod.torch.elastic.steps import StepWatch, is_plain
from horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """How one kind of value is saved, restored and given to all ranks."""

    def __init__(self, value):
        self.value = value
        self.save()

    def save(self):
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self):
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self):
        raise NotImplementedError

    def set_value(self, value):
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Of a torch.nn.Module."""

    def sync(self):
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """Of a torch.optim.Optimizer."""

    def sync(self):
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """Of an ElasticSampler: what rank 0 has processed counts for all."""

    def sync(self):
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "sampler"))
        self.save()


_handlers = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry():
    """Pairs of type and handler class; the first that fits is taken."""
    return list(_handlers)


def set_handler_registry(registry):
    """Replaces the pairs, to add types of one's own."""
    _handlers[:] = registry


def _handler_for(value):
    for kind, handler in _handlers:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """State of a training job: model, optimizer, and anything else by keyword.

    Modules, optimizers and ElasticSamplers are saved by their state_dict; other values as objects.
    """

    def __init__(self, model=None, optimizer=None, **kwargs):
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: _handler_for(value) for name, value in kwargs.items()}
        self._handlers = {name: handler for name, handler in handlers.items()
                          if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        rest = {name: value for name, value in kwargs.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **rest)
        self._watch = None
        self._watch_steps()

    def _values_of(self, kind):
        return [handler.value for handler in self._handlers.values()
                if type(handler) is kind]

    def _watch_steps(self):
        if self._watch is not None:
            self._watch.remove()
        optimizers = self._values_of(OptimizerStateHandler)
        self._watch = None
        if len(optimizers) == 1:
            self._watch = StepWatch(optimizers[0], self._values_of(ModelStateHandler),
                                    self._position)

    def finish_steps(self, rejoin):
        optimizers = self._values_of(OptimizerStateHandler)
        if self._watch is not None and can_finish(optimizers[0]):
            finish_steps_of(optimizers[0], self._watch, lambda: self._rejoin(rejoin))

    def _rejoin(self, rejoin):
        rejoin()
        if not meet(True, self._watch.n_done):
            raise StepIsLost("the ranks that are left were not in the same step")
        for callback in self._reset_callbacks:
            callback()

    def _position(self):
        """How far the script says it is."""
        return ([sampler.state_dict() for sampler in self._values_of(SamplerStateHandler)],
                copy.deepcopy({name: getattr(self, name) for name in self._saved_state
                               if is_plain(getattr(self, name))}))

    def _can_stay(self):
        """Is there nothing that a failed step may have left half changed?"""
        known = (ModelStateHandler, OptimizerStateHandler, SamplerStateHandler)
        return (self._watch is not None and type(self).restore is TorchState.restore
                and all(type(handler) in known for handler in self._handlers.values())
                and all(is_plain(getattr(self, name)) for name in self._saved_state))

    def recover(self):
        if self._can_stay() and self._watch.go_to_last_step():
            self._drop_gradients()
            self.save()
        else:
            self.restore()

    def _drop_gradients(self):
        """Those of the failed step, and what optimizers know of them."""
        for handler in self._handlers.values():
            if type(handler) is OptimizerStateHandler:
                if hasattr(handler.value, "drop_gradients"):
                    handler.value.drop_gradients()
                handler.value.zero_grad()

    def save(self):
        for handler in self._handlers.values():
            handler.save()
        super().save()
        if self.__dict__.get("_watch") is not None:
            self._watch.note_commit()

    def contents(self):
        return {**super().contents(),
                **{name: handler.value for name, handler in self._handlers.items()}}

    def checkpoints(self):
        from horovod.torch import checkpoint

        return checkpoint

    def restore(self):
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self):
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        if self._watch is not None:
            self._watch.n_done = 0

    def reset(self):
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name, value):
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        super().__setattr__(name, value)
        if name in handlers and self.__dict__.get("_watch") is not None:
            self._watch_steps()
