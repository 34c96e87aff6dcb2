# SPDX-License-Identifier: Apache-2.0
"""`groups` of DistributedOptimizer and DistributedGradientTape: which gradients travel together."""
import warnings

from horovod.common.util import split_list

_WRONG = "groups should be a non-negative integer or a list of lists of variables."


def check_groups(groups, num_groups):
    """`groups` as users give it: a number, a list of lists of variables, or None."""
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed.",
                      DeprecationWarning, stacklevel=3)
        groups = groups if groups is not None else num_groups
    if groups is None:
        return None
    if isinstance(groups, bool) or not isinstance(groups, (int, list, tuple)):
        raise ValueError(_WRONG)
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(_WRONG)
        return groups or None
    if not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(_WRONG)
    return groups


def grouped_positions(groups, variables, identity=id):
    """Which positions of the variables travel together, as tuples; all others go alone."""
    if groups is None:
        return tuple((i,) for i in range(len(variables)))
    if isinstance(groups, int):
        return tuple(tuple(part) for part in split_list(range(len(variables)), groups))
    place = {identity(variable): i for i, variable in enumerate(variables)}
    grouped = []
    for group in groups:
        members = [place.pop(identity(variable), None) for variable in group]
        members = [i for i in members if i is not None]
        if members:
            grouped.append(tuple(members))
    return tuple(grouped) + tuple((i,) for i in sorted(place.values()))
