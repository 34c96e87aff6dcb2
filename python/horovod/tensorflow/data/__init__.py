# SPDX-License-Identifier: Apache-2.0
"""Input pipelines: tf.data on processes of their own, see compute_service."""
