# SPDX-License-Identifier: Apache-2.0
"""Which Spark task becomes which rank. Pure functions.

Spark deals partitions round-robin over hosts, so a task's partition is not its rank. Ranks are
dealt host by host: the host of partition 0 first, then the other hosts in the order of their keys,
going round; within a host in the order of the partitions. In an elastic job whoever had the lowest
rank comes first, since the others get the state of rank 0.
"""
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple


class Place(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def environment(self) -> Dict[str, str]:
        return {f"HOROVOD_{name.upper()}": str(value) for name, value in self._asdict().items()}


def hosts_in_order(host_of: Mapping[int, str]) -> List[str]:
    """Host keys, the one of partition 0 first, the others sorted, going round."""
    hosts = sorted(set(host_of.values()))
    first = hosts.index(host_of[0])
    return hosts[first:] + hosts[:first]


def places(host_of: Mapping[int, str]) -> Dict[int, Place]:
    """The place of each partition; host_of has every partition from 0 to n - 1."""
    hosts = hosts_in_order(host_of)
    return deal([(index, host_of[index])
                 for index in sorted(host_of, key=lambda index: (hosts.index(host_of[index]),
                                                                 index))])


def deal(tasks: Sequence[Tuple[int, str]]) -> Dict[int, Place]:
    """The places of (task, host) host by host, hosts and tasks in the order they come in."""
    tasks_of: Dict[str, List[int]] = {}
    for index, host in tasks:
        tasks_of.setdefault(host, []).append(index)
    placed: Dict[int, Place] = {}
    for host, indexes in tasks_of.items():
        for local_rank, index in enumerate(indexes):
            # Hosts that are large enough to have this local rank, in order.
            having = [other for other in tasks_of if len(tasks_of[other]) > local_rank]
            placed[index] = Place(rank=len(placed), size=len(tasks), local_rank=local_rank,
                                  local_size=len(indexes), cross_rank=having.index(host),
                                  cross_size=len(having))
    return placed
