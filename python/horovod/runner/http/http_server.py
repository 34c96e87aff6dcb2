# SPDX-License-Identifier: Apache-2.0
"""The rendezvous server, for programs that start ranks by themselves.

    server = RendezvousServer()
    server.start()
    for slot in get_host_assignments(hosts, n):           # horovod.runner.common.util.hosts
        start(command, env={**os.environ, **server.environment(address, slot)})
    ...
    server.stop()

It is not HTTP any more, whatever its module is called: ranks prove that they know the job's secret,
which is in a file only this user can read. A rank on another host needs a copy of that file there,
named by HOROVOD_SECRET_FILE.
"""
import os
import tempfile

from horovod import _core
from horovod.runner.common.util import secret as _secret


class RendezvousServer:
    """Where the ranks of a job find each other."""

    def __init__(self, verbose=0):
        self._verbose = verbose
        self._server = None
        self.port = None
        self.secret_file = None

    def start(self, handler_cls=None):
        """Returns the port."""
        if handler_cls is not None:
            raise NotImplementedError("handler_cls: this server speaks no HTTP; an elastic job is "
                                      "started with horovodrun --host-discovery-script or "
                                      "horovod.run(min_num_proc=...)")
        if self._server is not None:
            raise RuntimeError("the rendezvous server runs already")
        key = _secret.make_secret_key()
        descriptor, self.secret_file = tempfile.mkstemp(prefix="horovod-secret-")
        with os.fdopen(descriptor, "w") as file:
            file.write(key.hex())
        self._server, self.port = _core.rendezvous_start(None, 0, key)
        if self._verbose:
            print(f"Rendezvous INFO: the server listens on port {self.port}.", flush=True)
        return self.port

    def init(self, host_alloc_plan):
        """Takes who will come; nothing to prepare, ranks say so themselves. Returns the port."""
        del host_alloc_plan
        if self._server is None:
            raise RuntimeError("the rendezvous server does not run yet: call start() first")
        return self.port

    def environment(self, address, slot):
        """What a rank needs: the address of this host as the rank sees it, and its SlotInfo."""
        return {"HOROVOD_RENDEZVOUS_ADDR": address, "HOROVOD_RENDEZVOUS_PORT": str(self.port),
                "HOROVOD_SECRET_FILE": self.secret_file, "HOROVOD_HOSTNAME": slot.hostname,
                "HOROVOD_RANK": str(slot.rank), "HOROVOD_SIZE": str(slot.size),
                "HOROVOD_LOCAL_RANK": str(slot.local_rank),
                "HOROVOD_LOCAL_SIZE": str(slot.local_size),
                "HOROVOD_CROSS_RANK": str(slot.cross_rank),
                "HOROVOD_CROSS_SIZE": str(slot.cross_size)}

    def stop(self):
        if self._server is not None:
            _core.rendezvous_stop(self._server)
            os.unlink(self.secret_file)
            self._server = self.port = self.secret_file = None
