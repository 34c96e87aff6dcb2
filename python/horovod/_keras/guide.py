# SPDX-License-Identifier: Apache-2.0
"""Where a script meets what Keras 3 or XLA no longer allow, it is told what to do, or helped.

introduce() is called by the doors, once for each Keras. It wraps two methods of Keras: compile() of
a model, to keep collectives away from XLA and overflows on all ranks, and the constructor of
optimizers, for the sake of lr=.
"""
import functools
import logging

from horovod._keras.optimizer import Distributed, scale_before_apply

_log = logging.getLogger("horovod")


@functools.lru_cache(maxsize=None)
def _say_once(text):
    _log.warning("%s", text)


def _is_distributed(optimizer):
    """Also if Keras has wrapped it to scale the loss."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return isinstance(optimizer, Distributed) or isinstance(inner, Distributed)


def switch_off_jit(model):
    """XLA cannot take collectives: a model whose optimizer is distributed must not use it."""
    if _is_distributed(getattr(model, "optimizer", None)) and getattr(model, "jit_compile", False):
        _say_once("collectives cannot be compiled by XLA: training goes on with "
                  "jit_compile=False")
        model.jit_compile = False


def _prepared(method):
    @functools.wraps(method)
    def compile_prepared(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        scale_before_apply(getattr(self, "optimizer", None))
        switch_off_jit(self)
        return result

    return compile_prepared


def _without_lr(method):
    @functools.wraps(method)
    def explain_lr(self, *args, **kwargs):
        if "lr" in kwargs:
            raise ValueError(
                f"Keras 3 has no lr=: write {type(self).__name__}(learning_rate=...), and "
                "optimizer.learning_rate instead of optimizer.lr.")
        return method(self, *args, **kwargs)

    return explain_lr


def _wrap(cls, name, wrapper):
    """Where the method is defined, as Keras compares methods to see if a user overrides them."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    method = vars(owner)[name]
    if not hasattr(method, "_hvd_wrapped"):
        wrapped = wrapper(method)
        wrapped._hvd_wrapped = True
        setattr(owner, name, wrapped)


def introduce(keras):
    """Prepares this Keras; again and again does no harm."""
    _wrap(keras.Model, "compile", _prepared)
    if hasattr(keras.optimizers.Optimizer, "stateless_apply"):  # Keras 2 explains it by itself
        _wrap(keras.optimizers.Optimizer, "__init__", _without_lr)
