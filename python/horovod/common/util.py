# SPDX-License-Identifier: Apache-2.0
"""Small things several packages need."""
import sys
import warnings

from horovod.common.basics import Adasum, Average, Sum
from horovod.common.exceptions import PACKAGE_FOLDER


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
        raise NotImplementedError("Running Adasum with a number of ranks that is no power of two "
                                  "is not supported.")


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
