# SPDX-License-Identifier: Apache-2.0
"""The exceptions users catch. The C extension raises the first two; it imports them from here."""
import os

# The extension leaves out frames below this folder when it looks for the user's line.
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class HorovodInternalError(RuntimeError):
    """A collective failed. Elastic training catches it, restores the last commit and goes on.

    status: name of the core's status, as HVD_PEER_LOST; where: the user's line that submitted.
    """

    status = ""
    where = ""


class NotInitializedError(HorovodInternalError, ValueError):
    """hvd.init() has not been called, or hvd.shutdown() has."""

    def __init__(self, *args):
        super().__init__(*args)
        from horovod.common import uncaught  # which needs the classes above

        uncaught.install_hooks()  # init() has not: the launcher is to learn of this, too


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed. Raised by State.commit() and check_host_updates().

    skip_sync: hosts only went away, so the state is the same on all ranks that stay.
    """

    def __init__(self, skip_sync=False):
        super().__init__("the hosts of the job changed")
        self.skip_sync = skip_sync


class JobEndsInterrupt(Exception):
    """The job is about to end. run() writes a checkpoint then, and ends the process."""


class HorovodVersionMismatchError(ImportError):
    """A framework other than the one a binding was made for."""

    def __init__(self, name, version, installed_version):
        super().__init__(
            f"Framework {name} installed with version {installed_version} but found version "
            f"{version}."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version
