# SPDX-License-Identifier: Apache-2.0
"""Loading models: their optimizer comes back distributed, with its state."""
from horovod._keras.guide import switch_off_jit
from horovod._keras.optimizer import Distributed, make_distributed


def load_model(keras, backend, filepath, custom_optimizers, custom_objects, legacy_opts, **options):
    """keras.models.load_model() with the optimizer turned into a distributed one."""
    del legacy_opts  # optimizers of either kind are recognised when they are loaded
    objects = {**backend.layers, **{cls.__name__: cls for cls in custom_optimizers or []},
               **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is None:
        return model
    if _lost_its_variables(model):
        model.optimizer = _restored_from_h5(model, filepath)
    if not isinstance(model.optimizer, Distributed):  # custom_objects may have made it so
        make_distributed(backend, model.optimizer, in_place=True, **options)
    switch_off_jit(model)
    return model


def _lost_its_variables(model):
    """Keras 3 builds the optimizer of an .h5 file on the variables of the outermost layer only."""
    known = getattr(model.optimizer, "_trainable_variables", None)
    built = getattr(model.optimizer, "built", False)
    return known is not None and built and len(known) != len(model.trainable_variables)


def _restored_from_h5(model, filepath):
    """The optimizer anew, built on all variables of the model, with the values of the file."""
    import h5py

    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    with h5py.File(filepath, "r") as file:
        group = file["optimizer_weights"] if "optimizer_weights" in file else None
        names = group.attrs["weight_names"] if group is not None else []
        values = [group[name][()] for name in names]
    variables = optimizer.variables
    if [value.shape for value in values] == [tuple(variable.shape) for variable in variables]:
        for variable, value in zip(variables, values):
            variable.assign(value)
    return optimizer
