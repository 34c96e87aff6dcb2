# SPDX-License-Identifier: Apache-2.0
"""Small things several packages need, and questions that programs ask about this installation."""
import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import sysconfig
import warnings

from horovod.common import basics
from horovod.common.basics import Adasum, Average, Sum
from horovod.common.exceptions import PACKAGE_FOLDER

# Of a framework: where its binding is, and whether it sees a GPU.
_BINDINGS = {
    "torch": ("torch/mpi_ops.py", "import torch; found = torch.cuda.is_available()"),
    "tensorflow": ("libhvd_tf.so", "import tensorflow as tf; "
                                   "found = bool(tf.config.list_physical_devices('GPU'))"),
}


def handle_average_backwards_compatibility(op, average):
    """The reduction meant by `op` and the deprecated `average`."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one.")
        return check_op(op)
    if average is None:
        return Average
    warnings.warn("Parameter `average` has been replaced with `op`.", DeprecationWarning,
                  stacklevel=_users_level())
    return Average if average else Sum


def get_average_backwards_compatibility_fun(reduce_ops):
    """What handle_average_backwards_compatibility() is; all frameworks have the same reductions."""
    del reduce_ops
    return handle_average_backwards_compatibility


def check_op(op):
    """Refuses what only looks like a reduction, as torch.distributed.ReduceOp.SUM, which is 0."""
    if isinstance(op, bool) or not isinstance(op, int):
        raise TypeError(f"op is {op!r}; one of hvd.Average, hvd.Sum, hvd.Min, hvd.Max, "
                        "hvd.Product and hvd.Adasum is expected")
    return op


def _users_level():
    """stacklevel, for the caller, of the innermost frame outside of this package.

    Python shows a DeprecationWarning only where it is about a line of the program itself.
    """
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frame, level = frame.f_back, level + 1
    return level


def num_rank_is_power_2(num_rank):
    """Is the number of ranks a power of two?"""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def check_adasum(op, process_set, size):
    """Refuses what Adasum cannot do."""
    if op != Adasum:
        return
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if not num_rank_is_power_2(size):
        raise NotImplementedError("Running Adasum with a number of ranks that is not a power of "
                                  "two is not supported.")


def split_list(items, n_parts):
    """The items in n_parts lists of nearly equal length, in order; empty ones are left out."""
    size, extra = divmod(len(items), n_parts)
    parts = []
    start = 0
    for i in range(n_parts):
        end = start + size + (1 if i < extra else 0)
        if end > start:
            parts.append(items[start:end])
        start = end
    return parts


def is_iterable(value):
    """Can it be gone through?"""
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def is_version_greater_equal_than(ver, target):
    """Is the version ver, as "2.15.1", the target or a later one?"""
    import packaging.version

    return packaging.version.parse(ver) >= packaging.version.parse(target)


def support_non_legacy_keras_optimizers(k):
    """Has this Keras, a module, the optimizers that came with 2.11?"""
    return is_version_greater_equal_than(k.__version__, "2.11")


@contextlib.contextmanager
def env(**variables):
    """Variables of the environment, inside a with; None takes one away."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _put(variables)
        yield
    finally:
        _put(before)


def _put(variables):
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# --- Questions about this installation ------------------------------------------------------------
# A framework is asked in a Python of its own: importing one may take long, or take the GPU.


def get_ext_suffix():
    """How the file of an extension module ends."""
    return sysconfig.get_config_var("EXT_SUFFIX")


def get_extension_full_path(pkg_path, *args):
    """Where an extension beside the module pkg_path would be."""
    *folders, name = args
    return os.path.join(os.path.dirname(os.path.abspath(pkg_path)), *folders,
                        name + get_ext_suffix())


def check_extension(ext_name, ext_env_var=None, pkg_path=None, *args):
    """ImportError if there is no binding for a framework, as "horovod.torch"."""
    del ext_env_var, pkg_path, args  # how it was built: there is one build
    framework = ext_name.rpartition(".")[2]
    binding = _BINDINGS.get(framework)
    if binding is None:
        raise ImportError(f"Extension {ext_name} has not been built: this Horovod has bindings for "
                          f"{', '.join(sorted(_BINDINGS))} only, and Keras on both.")
    if not os.path.exists(os.path.join(PACKAGE_FOLDER, binding[0])):
        raise ImportError(f"Extension {ext_name} has not been built: there is no {binding[0]} in "
                          f"{PACKAGE_FOLDER}. Install horovod again.")


def check_installed_version(name, version, exception=None):
    """Nothing to compare: the bindings are not made for one version. Raises the exception given."""
    del name, version
    if exception is not None:
        raise exception


@functools.lru_cache(maxsize=None)
def _holds(code):
    """Does Python find it so?"""
    done = subprocess.run([sys.executable, "-c", f"{code}; raise SystemExit(not found)"],
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stderr


def _ask(code, verbose):
    found, said = _holds(code)
    if verbose and said:
        print(said, file=sys.stderr, end="")
    return found


def extension_available(ext_base_name, verbose=False):
    """Can horovod.<name> be imported, as "torch" or "tensorflow"?"""
    if importlib.util.find_spec("horovod." + ext_base_name) is None:
        return False
    return _ask(f"import horovod.{ext_base_name}; found = True", verbose)


def gpu_available(ext_base_name, verbose=False):
    """Does the framework see a GPU here?"""
    return ext_base_name in _BINDINGS and _ask(_BINDINGS[ext_base_name][1], verbose)


def mpi_built(verbose=False):
    """Is MPI supported?"""
    del verbose
    return basics.mpi_built()


def gloo_built(verbose=False):
    """Can jobs run without MPI?"""
    del verbose
    return basics.gloo_built()


def nccl_built(verbose=False):
    """Is NCCL used?"""
    del verbose
    return bool(basics.nccl_built())


def ddl_built(verbose=False):
    """Is IBM's DDL used?"""
    del verbose
    return basics.ddl_built()


def ccl_built(verbose=False):
    """Is oneCCL used?"""
    del verbose
    return basics.ccl_built()
