# SPDX-License-Identifier: Apache-2.0
"""Keras, written once: horovod.keras and horovod.tensorflow.keras are lists of names of it.

Nothing here imports Keras or a framework by itself: those two say which Keras they mean, and
backends.py finds the binding for the framework it runs on.
"""
