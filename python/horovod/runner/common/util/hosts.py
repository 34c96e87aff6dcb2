# SPDX-License-Identifier: Apache-2.0
"""Hosts with their slots, and which slot becomes which rank."""
import collections
import re
from dataclasses import astuple, dataclass

_HOST = re.compile(r"^(?P<name>[\w.@-]+|\[[0-9A-Fa-f:.%]+\]):(?P<slots>[0-9]+)$")
_HOST_LINE = re.compile(r"^(?P<name>\S+)\s+slots\s*=\s*(?P<slots>[0-9]+)$")


@dataclass
class HostInfo:
    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string):
        """Of "name:slots"."""
        found = _HOST.match(host_string.strip())
        if found is None:
            raise ValueError(f"Invalid host input {host_string!r}: it must be name:slots, as "
                             "worker-0:2")
        return HostInfo(found.group("name"), int(found.group("slots")))


@dataclass
class SlotInfo:
    """The place of one process in the job."""
    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int = None
    cross_size: int = None

    def to_response_string(self):
        return ",".join(str(number) for number in (
            self.rank, self.size, self.local_rank, self.local_size, self.cross_rank,
            self.cross_size))

    @staticmethod
    def from_response_string(text):
        rank, size, local_rank, local_size, cross_rank, cross_size = map(int, text.split(","))
        return SlotInfo("", rank, local_rank, cross_rank, size, local_size, cross_size)

    def __hash__(self):
        return hash(astuple(self))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string):
    """The HostInfos of "a:2,b:4"."""
    return [HostInfo.from_string(host) for host in hosts_string.split(",")]


def parse_host_files(filename):
    """The hosts of a file with lines "name slots=2", as "a:2,b:4"; # begins a comment."""
    hosts = []
    with open(filename, encoding="utf-8") as file:
        for line in file:
            line = line.partition("#")[0].strip()
            found = _HOST_LINE.match(line)
            if line and found is None:
                raise ValueError(f"{filename}: {line!r} is not a host: it must be name slots=N")
            if line:
                hosts.append(f"{found.group('name')}:{found.group('slots')}")
    return ",".join(hosts)


def parse_hosts_and_slots(hosts):
    """(names, {name: slots}) of "a:2,b:4"."""
    infos = parse_hosts(hosts)
    return [info.hostname for info in infos], {info.hostname: info.slots for info in infos}


def get_host_assignments(hosts, min_num_proc, max_num_proc=None):
    """The SlotInfos by rank: all slots of a host, then those of the next, up to max_num_proc."""
    slots = []
    for host in hosts:
        free = host.slots if max_num_proc is None else min(host.slots, max_num_proc - len(slots))
        slots += [(host.hostname, local_rank) for local_rank in range(free)]
    if len(slots) < min_num_proc:
        raise ValueError(f"Requested more processes ({min_num_proc}) than there are available "
                         f"slots ({len(slots)})")
    local_sizes = collections.Counter(name for name, _ in slots)
    cross_sizes = collections.Counter(local_rank for _, local_rank in slots)
    seen = collections.Counter()
    assigned = []
    for rank, (name, local_rank) in enumerate(slots):
        assigned.append(SlotInfo(name, rank, local_rank, seen[local_rank], len(slots),
                                 local_sizes[name], cross_sizes[local_rank]))
        seen[local_rank] += 1
    return assigned
