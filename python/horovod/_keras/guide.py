# SPDX-License-Identifier: Apache-2.0
"""Where a script meets what Keras 3 or XLA no longer allow, it is told what to do, or helped.

Keras calls nothing of ours at these points, so methods of it are wrapped: compile() of a model, to
keep collectives away from XLA; the beginning of training, to find models whose optimizer is not
distributed, or no longer; and the constructor of optimizers that scale the loss, to keep overflows
on all ranks. In Keras 3 words of Keras 2 are looked after as well.

Importing changes nothing. The methods are wrapped from init(), or from the first distributed
optimizer if that comes earlier, and put back by shutdown().
"""
import functools

from horovod._keras.optimizer import CallableList, Distributed, name_of_twin, scale_before_apply
from horovod._keras.say import say_once
from horovod.common import basics


def _is_distributed(optimizer):
    """Also if Keras has wrapped it to scale the loss."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return isinstance(optimizer, Distributed) or isinstance(inner, Distributed)


def switch_off_jit(model):
    """XLA cannot compile collectives: a model whose optimizer is distributed must not use it."""
    if _is_distributed(getattr(model, "optimizer", None)) and getattr(model, "jit_compile", False):
        say_once("XLA cannot compile collectives: training continues with jit_compile=False")
        model.jit_compile = False


def _prepared(method):
    @functools.wraps(method)
    def compile_prepared(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        switch_off_jit(self)
        return result

    return compile_prepared


def _was_distributed(optimizer):
    """Has it come from the configuration of a distributed one? The name is all that is left."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return not _is_distributed(optimizer) and any(
        getattr(one, "name", None) == name_of_twin(type(one)) for one in (optimizer, inner))


def _has_own_train_step(model):
    """A user's may reduce gradients with a tape."""
    owner = next(base for base in type(model).__mro__ if "train_step" in vars(base))
    return not owner.__module__.startswith(("keras.", "tf_keras.", "tensorflow."))


def _look_at_optimizer(model):
    optimizer = getattr(model, "optimizer", None)
    if _was_distributed(optimizer):
        say_once("this model's optimizer is no longer distributed (it was copied or loaded), "
                 "so each rank trains alone. Load with hvd.load_model(), or compile() the "
                 "model with hvd.DistributedOptimizer(...)")
    elif (optimizer is not None and not _is_distributed(optimizer) and basics.rank() == 0
          and not _has_own_train_step(model) and basics.training_checks_are_on()):
        say_once(f"fit() with an ordinary optimizer ({type(optimizer).__name__}) in a job of "
                 f"{basics.size()} ranks: each rank trains a model of its own. Compile the model "
                 "with hvd.DistributedOptimizer(...) (HOROVOD_TRAINING_CHECKS=0 turns this check "
                 "off)")


def _looking_for_copies(method):
    """A copy of a model, however it was made, has an ordinary optimizer."""

    @functools.wraps(method)
    def train_with_all_ranks(self, *args, **kwargs):
        if basics.is_initialized() and basics.size() > 1:
            _look_at_optimizer(self)
        return method(self, *args, **kwargs)

    return train_with_all_ranks


def _scaling(method):
    @functools.wraps(method)
    def init_around_distributed(self, *args, **kwargs):
        method(self, *args, **kwargs)
        scale_before_apply(self)

    return init_around_distributed


# --- Words of Keras 2, which Keras 3 does not know ------------------------------------------------


def _without_run_tf_function(method):
    """Scripts of the time of TensorFlow 2.0 say this to have their own optimizer called."""

    @functools.wraps(method)
    def compile_forgiving(self, *args, **kwargs):
        if "experimental_run_tf_function" in kwargs:
            del kwargs["experimental_run_tf_function"]
            say_once("Keras 3 has no compile(experimental_run_tf_function=...): remove it, "
                     "training is the same without it")
        return method(self, *args, **kwargs)

    return compile_forgiving


def _without_lr(method):
    @functools.wraps(method)
    def explain_lr(self, *args, **kwargs):
        if "lr" in kwargs:
            raise ValueError(
                f"Keras 3 has no lr=: write {type(self).__name__}(learning_rate=...), and "
                "optimizer.learning_rate instead of optimizer.lr.")
        return method(self, *args, **kwargs)

    return explain_lr


def _get_lr(self):
    if "lr" in vars(self):
        return vars(self)["lr"]
    raise AttributeError("Keras 3 has no optimizer.lr: write optimizer.learning_rate")


def _set_lr(self, value):
    vars(self)["lr"] = value
    if type(self).__module__.startswith("keras."):  # users' own may well have an lr
        say_once("Keras 3 has no optimizer.lr, setting it changes nothing: write "
                 "optimizer.learning_rate = ...")


def _callable_too(variables):
    """variables() was a method once."""
    return property(lambda self: CallableList(variables.fget(self)), doc=variables.__doc__)


# --- Wrapping, and putting back -------------------------------------------------------------------

_wrapped = {}  # (class, name, wrapper) -> (what was there before, or None; what is there now)


def _put(owner, name, wrapper, make):
    if (owner, name, wrapper) not in _wrapped:
        before = vars(owner).get(name)
        now = make(before)
        _wrapped[owner, name, wrapper] = before, now
        setattr(owner, name, now)


def _wrap(cls, name, wrapper):
    """Where the method is defined, as Keras compares methods to see if a user overrides them."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    _put(owner, name, wrapper, wrapper)


def introduce(keras):
    """Prepares this Keras; again and again does no harm."""
    optimizer, scaler = keras.optimizers.Optimizer, keras.mixed_precision.LossScaleOptimizer
    _wrap(keras.Model, "compile", _prepared)
    _wrap(keras.Model, "make_train_function", _looking_for_copies)
    if not hasattr(optimizer, "stateless_apply"):  # Keras 2: for each generation of optimizers one
        for cls in scaler.__subclasses__():
            _wrap(cls, "__init__", _scaling)
        return
    _wrap(scaler, "__init__", _scaling)
    _wrap(keras.Model, "compile", _without_run_tf_function)
    _wrap(optimizer, "__init__", _without_lr)
    _wrap(optimizer, "variables", _callable_too)
    _put(optimizer, "lr", property, lambda _: property(_get_lr, _set_lr))


def look_after(keras):
    """Prepares this Keras for as long as the process belongs to a job."""
    basics.on_init(functools.partial(introduce, keras))
    if basics.is_initialized():
        introduce(keras)


@basics.on_shutdown
def put_back():
    """Keras as it was, except where somebody else has wrapped what we did."""
    for (owner, name, _), (before, now) in reversed(_wrapped.items()):
        if vars(owner).get(name) is not now:
            continue
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    _wrapped.clear()
