# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: hvd.checkpoint.save() and load(); docs/checkpoints.md."""
from horovod._keras.checkpoint import load, save

__all__ = ["load", "save"]
