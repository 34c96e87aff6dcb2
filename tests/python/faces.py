# SPDX-License-Identifier: Apache-2.0
"""Prints, as JSON, what importing the modules given does, for test_faces.py.

    faces.py names MODULE...    their public names
    faces.py foreign MODULE...  functions and classes of others that are not what they were
"""
import importlib
import inspect
import json
import sys
import warnings

# Modules of others, whose functions and classes, with their methods, must stay what they are.
FOREIGN = ["torch", "torch.nn", "torch.optim", "torch.distributed", "torch.futures",
           "torch.distributed.distributed_c10d", "torch.distributed.rendezvous", "torch.autograd",
           "tensorflow", "tensorflow.data", "tensorflow.keras", "keras", "keras.optimizers",
           "keras.layers", "keras.callbacks", "keras.mixed_precision", "numpy", "pyspark",
           "pyspark.sql", "pyspark.ml", "pickle", "cloudpickle", "threading", "subprocess", "os",
           "socket"]
_MISSING = "not there"


def _is_theirs(value):
    return not str(getattr(value, "__module__", "")).startswith("horovod")


def photograph(names):
    """{place: object} of every function, class, and attribute of a class."""
    seen = {}
    for name in names:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if inspect.isclass(value) and _is_theirs(value):
                for base in value.__mro__:
                    for member, what in list(vars(base).items()):
                        seen[f"{base.__module__}.{base.__qualname__}.{member}"] = what
            if inspect.isroutine(value) or inspect.isclass(value):
                seen[f"{name}.{attribute}"] = value
    return seen


def _settle(names):
    """Modules that import others late have done so when they are imported here."""
    loaded = []
    for name in names:
        try:
            importlib.import_module(name)
            loaded.append(name)
        except ImportError:
            pass
    return [name for name in loaded if name in sys.modules]


def changes(before, after):
    """Places whose object differs; members that appear in classes of others count too."""
    classes = {place.rpartition(".")[0] for place in before}
    differing = {place for place, what in before.items() if after.get(place, _MISSING) is not what}
    added = {place for place in set(after) - set(before) if place.rpartition(".")[0] in classes}
    return sorted(place for place in differing | added
                  if not place.rpartition(".")[2].startswith(("__", "_abc_"))
                  or place.endswith(".__init__"))


def main():
    warnings.simplefilter("ignore")
    what, modules = sys.argv[1], sys.argv[2:]
    if what == "names":
        found = {name: sorted(n for n in dir(importlib.import_module(name)) if n[0] != "_")
                 for name in modules}
    else:
        names = _settle(FOREIGN)
        before = photograph(names)
        for name in modules:
            importlib.import_module(name)
        found = changes(before, photograph(names))
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
