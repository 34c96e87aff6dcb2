# SPDX-License-Identifier: Apache-2.0
"""Which Spark task becomes which rank. Pure functions.

Spark deals partitions round-robin over hosts, so a task's partition is not its rank. Ranks are
dealt host by host: the host of partition 0 first, then the other hosts in the order of their keys,
going round; within a host in the order of the partitions.
"""
from typing import Dict, List, Mapping, NamedTuple


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
    tasks_of: Dict[str, List[int]] = {host: [] for host in hosts}
    for index in sorted(host_of):
        tasks_of[host_of[index]].append(index)
    placed: Dict[int, Place] = {}
    for host in hosts:
        for local_rank, index in enumerate(tasks_of[host]):
            # Hosts that are large enough to have this local rank, in order.
            having = [other for other in hosts if len(tasks_of[other]) > local_rank]
            placed[index] = Place(rank=len(placed), size=len(host_of), local_rank=local_rank,
                                  local_size=len(tasks_of[host]), cross_rank=having.index(host),
                                  cross_size=len(having))
    return placed
