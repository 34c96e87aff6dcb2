# SPDX-License-Identifier: Apache-2.0
"""Not there: programs for horovod.mxnet are told what takes its place."""

raise ModuleNotFoundError(
    "There is no horovod.mxnet here, for MXNet is no longer developed. Use horovod.torch, "
    "horovod.tensorflow or horovod.keras", name=__name__)
