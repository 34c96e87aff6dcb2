# SPDX-License-Identifier: Apache-2.0
"""The functions of horovod.keras and horovod.tensorflow.keras, made for the Keras each means."""
import types

from horovod._keras import guide, models
from horovod._keras.backends import backend_of
from horovod._keras.optimizer import make_distributed
from horovod.common.basics import Average, Sum
from horovod.common.process_sets import global_process_set
from horovod.common.util import handle_average_backwards_compatibility


def functions_for(keras, Compression, module):
    """The functions, by name; module is where users find them, and pickles look for them."""
    guide.look_after(keras)

    def DistributedOptimizer(optimizer, name=None, device_dense="", device_sparse="",
                             compression=Compression.none, sparse_as_dense=False,
                             gradient_predivide_factor=1.0, op=Average,
                             backward_passes_per_step=1, average_aggregated_gradients=False,
                             num_groups=0, groups=None, process_set=global_process_set,
                             scale_local_gradients=True):
        """An optimizer like the given one that applies the gradients of all ranks.

        backward_passes_per_step: gradients are added up that many times before they are reduced.
        groups: a number, or lists of variables, whose gradients travel together.
        """
        if op not in (Average, Sum):
            raise ValueError("op currently only supports Average and Sum")
        guide.introduce(keras)
        return make_distributed(
            backend_of(keras), optimizer, backward_passes_per_step, average_aggregated_gradients,
            name=name, device_dense=device_dense, device_sparse=device_sparse,
            compression=compression, sparse_as_dense=sparse_as_dense, op=op,
            gradient_predivide_factor=gradient_predivide_factor, num_groups=num_groups,
            groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients)

    def PartialDistributedOptimizer(optimizer, name=None, device_dense="", device_sparse="",
                                    compression=Compression.none, sparse_as_dense=False,
                                    gradient_predivide_factor=1.0, op=Average,
                                    backward_passes_per_step=1, average_aggregated_gradients=False,
                                    groups=None, process_set=global_process_set, local_layers=None,
                                    scale_local_gradients=True):
        """DistributedOptimizer() with layers whose gradients stay on their rank.

        They must be built.
        """
        layers = local_layers or []
        layers = list(layers) if isinstance(layers, (list, tuple)) else [layers]
        if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
            raise ValueError("All local layers must be of keras.layers.Layer type.")
        distributed = DistributedOptimizer(
            optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
            gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients,
            0, groups, process_set, scale_local_gradients)
        for layer in layers:
            for variable in layer.trainable_weights:
                distributed.register_local_var(variable)
        return distributed

    def broadcast_global_variables(root_rank):
        """Gives all global variables the values of root_rank (graph mode of TensorFlow only)."""
        return backend_of(keras).broadcast_global_variables(root_rank)

    def allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0,
                  op=None, compression=Compression.none):
        """The reduction of a value over all ranks."""
        op = handle_average_backwards_compatibility(op, average)
        return backend_of(keras).allreduce(value, name, op, prescale_factor, postscale_factor,
                                           compression)

    def allgather(value, name=None):
        """The values of all ranks, one after the other along the first dimension."""
        return backend_of(keras).allgather(value, name)

    def broadcast(value, root_rank, name=None):
        """The value of root_rank."""
        return backend_of(keras).broadcast(value, root_rank, name)

    def reducescatter(value, name=None, op=Average):
        """This rank's rows of the reduction of a value over all ranks."""
        return backend_of(keras).reducescatter(value, name, op)

    def load_model(filepath, custom_optimizers=None, custom_objects=None,
                   compression=Compression.none, legacy_opts=False):
        """Loads a saved model; its optimizer is distributed and goes on where it was."""
        guide.introduce(keras)
        return models.load_model(keras, backend_of(keras), filepath, custom_optimizers,
                                 custom_objects, legacy_opts, compression=compression, op=Average,
                                 gradient_predivide_factor=1.0, process_set=global_process_set,
                                 scale_local_gradients=True)

    functions = [DistributedOptimizer, PartialDistributedOptimizer, broadcast_global_variables,
                 allreduce, allgather, broadcast, reducescatter, load_model]
    for function in functions:
        function.__module__, function.__qualname__ = module, function.__name__
    return types.SimpleNamespace(**{function.__name__: function for function in functions})
