# SPDX-License-Identifier: Apache-2.0
"""Variables as keys of dictionaries, and whether a graph is being built."""
from horovod.tensorflow.collectives import as_tf_variable
from horovod.tensorflow.mpi_ops import _executing_eagerly  # noqa: F401 - exported


def vars_to_refs(variables):
    """What can be hashed and compared, for a variable, or for each in a list of any depth."""
    if isinstance(variables, (list, tuple)):
        return tuple(vars_to_refs(variable) for variable in variables)
    return as_tf_variable(variables).ref()


def refs_to_vars(refs):
    """The tf.Variables of vars_to_refs()."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()
