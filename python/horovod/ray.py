# SPDX-License-Identifier: Apache-2.0
"""Not there: programs for horovod.ray are told what takes its place."""

raise ModuleNotFoundError(
    "There is no horovod.ray here (RayExecutor, ElasticRayExecutor). Call horovod.run() with the "
    "hosts of the Ray cluster, or use Ray Train with torch.distributed's backend \"hvd\"",
    name=__name__)
