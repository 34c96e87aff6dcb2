# SPDX-License-Identifier: Apache-2.0
"""What Keras runs on: for each framework, how gradients are reduced and variables broadcast.

A backend is a class with
  Compression                    the framework's
  layers                         of Horovod, by the name saved models have for them
  reducer(**options)             an object with reduce(grads, variables), register_local_var()
  aggregator(n, reducer, ...)    an object with step(grads, variables, apply, skip)
  broadcast_variables(v, root)   in place
  broadcast_global_variables(root)     of a graph of TensorFlow 1 style
  elastic_run(func, checkpoint)  the framework's elastic loop
  allreduce, allgather, broadcast, reducescatter     of one value
"""
from horovod.common import basics
from horovod.common.groups import check_groups, grouped_positions


def name_of(keras):
    """What this Keras runs on."""
    return keras.backend.backend()


class TensorFlowBackend:
    """Keras 2, and Keras 3 with TensorFlow."""

    def __init__(self):
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self.Compression = hvd.Compression
        self.layers = {"SyncBatchNormalization": hvd.SyncBatchNormalization}

    def reducer(self, prefix, **options):
        from horovod.tensorflow.gradients import GradientReducer

        return GradientReducer(prefix, **options)

    def aggregator(self, passes, reducer, sparse_as_dense, average):
        return self._hvd.LocalGradientAggregationHelper(
            passes, reducer.reduce, sparse_as_dense, average, self._hvd.rank(), "keras")

    def elastic_run(self, func, checkpoint=None):
        return self._hvd.elastic.run(func, checkpoint=checkpoint)

    def broadcast_variables(self, variables, root_rank):
        return self._hvd.broadcast_variables(variables, root_rank)

    def broadcast_global_variables(self, root_rank):
        return self._hvd.broadcast_global_variables(root_rank)

    def allreduce(self, value, name, op, prescale_factor, postscale_factor, compression):
        return _evaluated(self._hvd.allreduce(
            _tensor(value), op=op, name=name, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor, compression=compression))

    def allgather(self, value, name):
        return _evaluated(self._hvd.allgather(_tensor(value), name=name))

    def broadcast(self, value, root_rank, name):
        return _evaluated(self._hvd.broadcast(_tensor(value), root_rank, name=name))

    def reducescatter(self, value, name, op):
        return _evaluated(self._hvd.reducescatter(_tensor(value), name=name, op=op))


def _tensor(value):
    import tensorflow as tf

    return tf.convert_to_tensor(value)


def _evaluated(tensor):
    """Eagerly the tensor; in a graph of TensorFlow 1 style its value."""
    import tensorflow as tf

    if tf.executing_eagerly() or tf.inside_function():
        return tensor
    with tf.compat.v1.Session() as session:
        return session.run(tensor)


class _TorchReducer:
    """Reduces gradients of Keras' variables when they are tensors of PyTorch."""

    def __init__(self, hvd, compression, op, gradient_predivide_factor, process_set,
                 scale_local_gradients, groups):
        if gradient_predivide_factor != 1.0 and op != hvd.Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        self._hvd = hvd
        self._compression = compression
        self._how = dict(op=op, prescale_factor=1.0 / gradient_predivide_factor,
                         postscale_factor=gradient_predivide_factor, process_set=process_set)
        self._set = process_set
        self._scale = scale_local_gradients
        self._groups = groups
        self._local = {}

    def register_local_var(self, variable):
        self._local[id(variable)] = variable

    def reduce(self, grads, variables):
        result = list(grads)
        basics.check_not_left_out()
        if not self._set.included() or self._set.size() == 1:
            return result
        shared = []
        for i, (grad, variable) in enumerate(zip(grads, variables)):
            if grad is not None and id(variable) not in self._local:
                shared.append(i)
            elif grad is not None and self._scale:
                result[i] = grad / self._set.size()
        groups = grouped_positions(self._groups, [variables[i] for i in shared])
        flying = [self._start([shared[k] for k in group], grads) for group in groups]
        for members, contexts, handle in flying:
            reduced = self._hvd.synchronize(handle)
            for i, context, wire in zip(members, contexts,
                                        reduced if len(members) > 1 else [reduced]):
                result[i] = self._compression.decompress(wire, context)
        return result

    def _start(self, members, grads):
        """Sends the gradients at these positions on their way, together."""
        wires, contexts = zip(*[self._compression.compress(grads[i].contiguous())
                                for i in members])
        name = f"keras.grad_{members[0]}"
        if len(members) == 1:
            handle = self._hvd.allreduce_async(wires[0], name=name, **self._how)
        else:
            handle = self._hvd.grouped_allreduce_async(list(wires), name=name, **self._how)
        return members, contexts, handle


class _TorchAggregator:
    """Adds up gradients of several passes; everything is eager here."""

    def __init__(self, passes, reducer, average):
        if passes < 1:
            raise ValueError("backward_passes_per_step must be > 0")
        self._passes = passes
        self._reducer = reducer
        self._average = average
        self._sums = None
        self._count = 0

    def step(self, grads, variables, apply, skip):
        if self._sums is None:
            self._sums = [None] * len(grads)
        for i, grad in enumerate(grads):
            if grad is not None:
                self._sums[i] = grad.clone() if self._sums[i] is None else self._sums[i] + grad
        self._count += 1
        if self._count % self._passes != 0:
            skip()
            return
        sums, self._sums = self._sums, None
        if self._average:
            sums = [total if total is None else total / self._passes for total in sums]
        apply(self._reducer.reduce(sums, variables))


class TorchBackend:
    """Keras 3 with PyTorch."""

    def __init__(self):
        import horovod.torch as hvd

        self._hvd = hvd
        self.Compression = hvd.Compression
        self.layers = {}

    def reducer(self, prefix, compression, op, gradient_predivide_factor, process_set,
                scale_local_gradients, num_groups=0, groups=None, **_):
        del prefix
        return _TorchReducer(self._hvd, compression, op, gradient_predivide_factor, process_set,
                             scale_local_gradients, check_groups(groups, num_groups))

    def aggregator(self, passes, reducer, sparse_as_dense, average):
        del sparse_as_dense
        return _TorchAggregator(passes, reducer, average)

    def elastic_run(self, func, checkpoint=None):
        return self._hvd.elastic.run(func, checkpoint=checkpoint)

    def broadcast_variables(self, variables, root_rank):
        tensors = [variable.value.data for variable in variables]
        handles = [self._hvd.broadcast_async_(tensor, root_rank, name=f"keras.variable_{i}")
                   for i, tensor in enumerate(tensors)]
        for handle in handles:
            self._hvd.synchronize(handle)

    def broadcast_global_variables(self, root_rank):
        raise RuntimeError(
            "hvd.broadcast_global_variables() is for graphs of TensorFlow 1 style, and Keras runs "
            "on torch. Please use `hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)` in "
            "model.fit() instead.")

    def _tensor(self, value):
        import torch

        inner = getattr(value, "value", None)  # of a variable of Keras
        return inner if torch.is_tensor(inner) else torch.as_tensor(value)

    def allreduce(self, value, name, op, prescale_factor, postscale_factor, compression):
        return self._hvd.allreduce(self._tensor(value), name=name, op=op, compression=compression,
                                   prescale_factor=prescale_factor,
                                   postscale_factor=postscale_factor)

    def allgather(self, value, name):
        return self._hvd.allgather(self._tensor(value), name=name)

    def broadcast(self, value, root_rank, name):
        return self._hvd.broadcast(self._tensor(value), root_rank, name=name)

    def reducescatter(self, value, name, op):
        return self._hvd.reducescatter(self._tensor(value), name=name, op=op)


_BACKENDS = {"tensorflow": TensorFlowBackend, "torch": TorchBackend}
_made = {}


def backend_of(keras):
    """The backend for this Keras, made once."""
    name = name_of(keras)
    if name not in _BACKENDS:
        raise ImportError(
            f"Keras runs on {name}, which Horovod does not support; set KERAS_BACKEND to one of "
            f"{', '.join(sorted(_BACKENDS))}.")
    if name not in _made:
        _made[name] = _BACKENDS[name]()
    return _made[name]
