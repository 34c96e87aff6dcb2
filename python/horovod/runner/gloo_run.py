# SPDX-License-Identifier: Apache-2.0
"""Not there: the inside of the original's launcher. Whoever takes a name from it is told why."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(
        f"horovod.runner.gloo_run has no {name}: ranks are started by horovodrun, or by "
        "horovod.run() from a program. A launcher of your own gets the variables of a rank from "
        "horovod.runner.http.http_server.RendezvousServer.environment(address, slot)")
