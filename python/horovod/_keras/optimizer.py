# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer for Keras 2 and 3: a subclass of the user's optimizer, made on the fly.

It keeps the names of its base class, so saved models say "Adam" and can be loaded without Horovod.
What its class makes, from_config() for example, has the same options.

Gradients are reduced where they are applied, which all ways to train have in common: fit(),
minimize(), and a loop of one's own. Optimizers of Keras 2 that were asked to compute them have
reduced them then.
"""
import functools
import inspect
import sys
import warnings

from horovod._keras.say import say_once


class CallableList(list):
    """A list that scripts may also call: optimizer.variables() was a method once."""

    def __call__(self):
        return self


class Distributed:
    """What both generations of optimizers get."""

    _HAS_AGGREGATE_GRAD = True  # Keras 2: gradients need not be aggregated by a tf.distribute
    _hvd_parts = None  # of a class: makes what _hvd_setup() takes, for copies

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._hvd_setup(*self._hvd_parts())

    def register_local_var(self, variable):
        """Leaves the gradients of this variable on their rank."""
        self._hvd_reducer.register_local_var(variable)

    def _hvd_setup(self, reducer, aggregator):
        self._hvd_reducer = reducer
        self._hvd_aggregator = aggregator
        return self


class _Keras3(Distributed):
    """Overrides apply(), which apply_gradients() and fit() come through.

    Scripts of Keras 2 compute gradients with the optimizer: that is still possible, and as there
    they are those of all ranks then.
    """

    _hvd_reduced = False  # the gradients of the next apply()

    def compute_gradients(self, loss, var_list=None, tape=None, grad_loss=None):
        """Pairs of (gradient, variable). loss: a function, or a tensor with the tape it is on."""
        import keras

        if keras.backend.backend() != "tensorflow":
            raise NotImplementedError("compute_gradients() is for Keras on TensorFlow: compute "
                                      "them with the framework and call apply_gradients(), which "
                                      "reduces them")
        import tensorflow as tf

        if callable(loss):
            with tf.GradientTape() as tape:
                loss = loss()
        elif tape is None:
            raise ValueError("`tape` is required when a `Tensor` loss is passed.")
        variables = self._trainable_variables if var_list is None else var_list
        variables = list(variables() if callable(variables) else variables)
        grads = tape.gradient(loss, variables, grad_loss)
        if self._hvd_aggregator is None:  # else they are added up first
            grads = self._hvd_reducer.reduce(grads, variables)
            self._hvd_reduced = True
        return list(zip(grads, variables))

    def _compute_gradients(self, loss, var_list=None, grad_loss=None, tape=None):
        return self.compute_gradients(loss, var_list, tape, grad_loss)

    def _hvd_reduce(self):
        """What makes an ordinary copy: of the class that others know."""
        make, arguments = super().__reduce__()
        return getattr(type(self).__bases__[1], make.__name__), arguments

    def __reduce__(self):
        say_once("a distributed optimizer is unpickled as an ordinary one: wrap it with "
                 "hvd.DistributedOptimizer() where it is loaded")
        return self._hvd_reduce()

    def __deepcopy__(self, memo):
        make, arguments = self._hvd_reduce()
        optimizer = make(*arguments)
        optimizer.__class__ = type(self)
        return optimizer._hvd_setup(*self._hvd_parts())

    def apply(self, grads, trainable_variables=None):
        grads = list(grads)
        reduced, self._hvd_reduced = self._hvd_reduced, False
        if not grads:
            return None
        if reduced:
            return super().apply(grads, trainable_variables)
        if trainable_variables is None:
            variables = list(self._trainable_variables)
        else:
            variables = list(trainable_variables)
            if not self.built:
                self.build(variables)
                self.built = True
        if self._hvd_aggregator is None:
            reduced = self._hvd_reducer.reduce(grads, variables)
            return super().apply(reduced, trainable_variables)
        base_apply = super().apply
        self._hvd_aggregator.step(
            grads, variables, lambda reduced: base_apply(reduced, variables),
            lambda: getattr(self, "inner_optimizer", self)._iterations.assign_add(1))
        return None

    @property
    def variables(self):
        return CallableList(super().variables)

    @property
    def lr(self):
        warnings.warn("Keras 3 has no optimizer.lr: write optimizer.learning_rate",
                      DeprecationWarning, stacklevel=2)
        return self.learning_rate

    @lr.setter
    def lr(self, value):
        warnings.warn("Keras 3 has no optimizer.lr: write optimizer.learning_rate",
                      DeprecationWarning, stacklevel=2)
        self.learning_rate = value


class _Keras2(Distributed):
    """Overrides apply_gradients(), and what computes them: minimize() and fit() do both.

    Between the two Keras looks for overflows, if the loss is scaled, and users clip: both see the
    gradients of all ranks.
    """

    _hvd_reduced = False  # the gradients of the next apply_gradients()

    def _hvd_reduce_early(self, grads, variables):
        if self._hvd_aggregator is not None:  # not yet: they are added up first
            return list(grads)
        self._hvd_reduced = True
        return self._hvd_reducer.reduce(grads, variables)

    def _hvd_reduce_pairs(self, pairs):
        grads, variables = zip(*pairs)
        return list(zip(self._hvd_reduce_early(grads, variables), variables))

    def compute_gradients(self, *args, **kwargs):
        return self._hvd_reduce_pairs(super().compute_gradients(*args, **kwargs))

    def _compute_gradients(self, loss, var_list=None, grad_loss=None, tape=None):
        """Of legacy optimizers, like the next; the others have one with no underscore only."""
        base = super()
        if hasattr(base, "_compute_gradients"):
            return self._hvd_reduce_pairs(base._compute_gradients(loss, var_list, grad_loss, tape))
        return self.compute_gradients(loss, var_list, tape)

    def get_gradients(self, loss, params):
        return self._hvd_reduce_early(super().get_gradients(loss, params), params)

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        reduced, self._hvd_reduced = self._hvd_reduced, False
        base_apply = super().apply_gradients
        if reduced or not pairs:
            return base_apply(pairs, *args, **kwargs)
        grads, variables = (list(column) for column in zip(*pairs))
        if self._hvd_aggregator is None:
            reduced = self._hvd_reducer.reduce(grads, variables)
            return base_apply(list(zip(reduced, variables)), *args, **kwargs)
        self._create_all(variables)
        return self._hvd_aggregator.step(
            grads, variables,
            lambda reduced: base_apply(list(zip(reduced, variables)), *args, **kwargs),
            lambda: self.iterations.assign_add(1))

    def _create_all(self, variables):
        """Variables of the optimizer must exist before it is called inside a condition."""
        import tensorflow as tf

        with tf.init_scope():
            if hasattr(self, "_create_all_weights"):
                self._create_all_weights(variables)
            elif not getattr(self, "_built", True):
                self.build(variables)


# Where Keras looks up by class what saved files call it: by its public name, or one that a user
# registered. Without them it would be the module the class is defined in, which Keras may change.
# Keras 2 has public names in the class itself, _keras_api_names.
_NAMES_IN_FILES = [("keras.src.api_export", "REGISTERED_OBJS_TO_NAMES"),
                   ("keras.src.saving.object_registration", "GLOBAL_CUSTOM_NAMES"),
                   ("keras.src.saving.object_registration", "_GLOBAL_CUSTOM_NAMES")]


def distributed_class(base, parts):
    """The distributed subclass of an optimizer class; parts() gives a reducer and an aggregator."""
    mixin = _Keras3 if hasattr(base, "stateless_apply") else _Keras2
    cls = type(base.__name__, (mixin, base), {
        "__module__": base.__module__, "__doc__": base.__doc__, "_hvd_parts": staticmethod(parts),
        **{name: value for name, value in vars(base).items() if name.startswith("_keras_api_")}})
    for module, names in _NAMES_IN_FILES:
        name_by_class = getattr(sys.modules.get(module), names, {})
        if base in name_by_class:
            name_by_class[cls] = name_by_class[base]
    return cls


def name_of_twin(base):
    """What the distributed twin of an optimizer of this class is called."""
    return f"Distributed{base.__name__}"


def scale_before_apply(optimizer):
    """A distributed optimizer has been wrapped to scale the loss: exchanges their roles.

    Else every rank would look for overflows in its own gradients, and those without one would wait
    for the others.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(inner, Distributed) and not isinstance(optimizer, Distributed):
        optimizer.__class__ = distributed_class(type(optimizer), inner._hvd_parts)
        optimizer._hvd_setup(inner._hvd_reducer, inner._hvd_aggregator)
        inner.__class__ = type(inner).__bases__[1]


def _twin(optimizer, base, name):
    """A new one from its configuration; or itself, if that does not say all there is to know.

    A user's class may take arguments that its get_config() leaves out.
    """
    try:
        config = optimizer.get_config()
        if not base.__module__.startswith(("keras.", "tf_keras.", "tensorflow.")):
            parameters = inspect.signature(base.__init__).parameters.values()
            named = {one.name for one in list(parameters)[1:]
                     if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
            if not named - {"name"} <= set(config):
                return optimizer
        if name is not None or "name" in config:
            config["name"] = name or name_of_twin(base)
        return base.from_config(config)
    except (TypeError, NotImplementedError):
        return optimizer


def make_distributed(backend, optimizer, backward_passes_per_step=1,
                     average_aggregated_gradients=False, in_place=False, name=None, **options):
    """The optimizer's distributed twin, from its configuration; or itself, turned into it.

    options: those of a reducer, see backends.py.
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "get_config"):
        raise ValueError("DistributedOptimizer takes an optimizer such as "
                         f"keras.optimizers.Adam(0.001), not {optimizer!r}")
    if isinstance(optimizer, Distributed):
        raise ValueError("this optimizer is distributed already")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    base = type(optimizer)
    if not in_place:
        optimizer = _twin(optimizer, base, name)
    parts = functools.partial(_parts, backend, name_of_twin(base), backward_passes_per_step,
                              average_aggregated_gradients)
    of_others = dict(options)
    if not isinstance(options.get("groups"), int):
        of_others["groups"] = None  # variables of this one's model
    optimizer.__class__ = distributed_class(base, functools.partial(parts, of_others))
    return optimizer._hvd_setup(*parts(options))


def _parts(backend, prefix, backward_passes_per_step, average_aggregated_gradients, options):
    reducer = backend.reducer(prefix, **options)
    if backward_passes_per_step == 1:
        return reducer, None
    return reducer, backend.aggregator(backward_passes_per_step, reducer,
                                       options.get("sparse_as_dense", False),
                                       average_aggregated_gradients)
