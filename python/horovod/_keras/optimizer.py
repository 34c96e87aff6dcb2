# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer for Keras 2 and 3: a subclass of the user's optimizer, made on the fly.

It keeps the name and module of its base class, so saved models say "Adam" and can be loaded without
Horovod. Gradients are reduced where they are applied, which all ways to train have in common:
fit(), minimize(), and a loop of one's own.
"""
import warnings


class CallableList(list):
    """A list that scripts may also call: optimizer.variables() was a method once."""

    def __call__(self):
        return self


class Distributed:
    """What both generations of optimizers get."""

    _HAS_AGGREGATE_GRAD = True  # Keras 2: gradients need not be aggregated by a tf.distribute

    def register_local_var(self, variable):
        """Leaves the gradients of this variable on their rank."""
        self._hvd_reducer.register_local_var(variable)

    def _hvd_setup(self, reducer, aggregator):
        self._hvd_reducer = reducer
        self._hvd_aggregator = aggregator
        return self


class _Keras3(Distributed):
    """Overrides apply(), which apply_gradients() and fit() come through."""

    def apply(self, grads, trainable_variables=None):
        grads = list(grads)
        if not grads:
            return None
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
            lambda: self._iterations.assign_add(1))
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
    """Overrides apply_gradients(), which minimize() and fit() come through."""

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        if not pairs:
            return super().apply_gradients(pairs, *args, **kwargs)
        grads, variables = (list(column) for column in zip(*pairs))
        base_apply = super().apply_gradients
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


def distributed_class(base):
    """The distributed subclass of an optimizer class."""
    mixin = _Keras3 if hasattr(base, "stateless_apply") else _Keras2
    return type(base.__name__, (mixin, base),
                {"__module__": base.__module__, "__doc__": base.__doc__})


def make_distributed(backend, optimizer, backward_passes_per_step=1,
                     average_aggregated_gradients=False, in_place=False, name=None, **options):
    """The optimizer's distributed twin, from its configuration; or itself, turned into it.

    options: those of a reducer, see backends.py.
    """
    if isinstance(optimizer, Distributed):
        raise ValueError("this optimizer is distributed already")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    cls = distributed_class(type(optimizer))
    if in_place:
        optimizer.__class__ = cls
    else:
        config = optimizer.get_config()
        if name is not None:
            config["name"] = name
        optimizer = cls.from_config(config)
    sparse_as_dense = options.get("sparse_as_dense", False)
    reducer = backend.reducer("Distributed" + cls.__name__, **options)
    aggregator = None
    if backward_passes_per_step > 1:
        aggregator = backend.aggregator(backward_passes_per_step, reducer, sparse_as_dense,
                                        average_aggregated_gradients)
    return optimizer._hvd_setup(reducer, aggregator)
