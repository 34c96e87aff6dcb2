# SPDX-License-Identifier: Apache-2.0
"""What programs of the original import to describe an elastic job; horovodrun drives it itself."""


def refusal(name):
    """What a name of the original's driver raises here."""
    return NotImplementedError(
        f"{name}: elastic jobs are driven by horovodrun itself, in a process of its own. Start "
        "one with horovod.run(func, min_num_proc=..., max_num_proc=..., "
        "host_discovery_script=discovery), where discovery may be a HostDiscovery, or with "
        "horovodrun --host-discovery-script")
