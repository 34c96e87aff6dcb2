# SPDX-License-Identifier: Apache-2.0
"""How a rank hears that hosts came or went, by its old address."""
from horovod.common.elastic import HostUpdateResult, WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
