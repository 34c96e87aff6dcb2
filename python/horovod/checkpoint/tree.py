# SPDX-License-Identifier: Apache-2.0
"""Nested state as JSON and tensors, and back.

Dictionaries, lists, tuples, numbers, texts and bytes become JSON that tells them apart; a tensor
becomes its name there. Nothing else is taken: what is read back are plain values, and no code of a
checkpoint is ever run.
"""
import base64

_PLAIN = (bool, int, float, str, type(None))


def flatten(state, framework):
    """(tree, {name: tensor}): the JSON of the state, and its tensors in a fixed order."""
    tensors = {}
    return _encode(state, "", framework, tensors), tensors


def _encode(value, path, framework, tensors):
    if type(value) in _PLAIN:
        return value
    if framework.is_tensor(value):
        name = path or "value"
        while name in tensors:  # keys 1 and "1"
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, path, framework, tensors),
                          _encode(item, _join(path, key), framework, tensors)]
                         for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, _join(path, i), framework, tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    inner = framework.state_of(value)
    if inner is not None:
        return _encode(inner, path, framework, tensors)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of NumPy
        return _encode(value.item(), path, framework, tensors)
    raise TypeError(
        f"a checkpoint cannot hold {path or 'the state'}, a {type(value).__module__}."
        f"{type(value).__qualname__}: give numbers, texts, tensors, lists and dictionaries of "
        "them, or objects with state_dict()")


def _join(path, key):
    return f"{path}/{key}" if path else str(key)


def build(tree, tensors):
    """The state that flatten() was given, of its JSON and {name: tensor}."""
    if isinstance(tree, list):
        return [build(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    [(kind, value)] = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {build(key, tensors): build(item, tensors) for key, item in value}
    if kind == "tuple":
        return tuple(build(item, tensors) for item in value)
    if kind == "bytes":
        return base64.b64decode(value)
    raise ValueError(f"the tree has an entry of unknown kind {kind!r}")
