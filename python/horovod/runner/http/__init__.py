# SPDX-License-Identifier: Apache-2.0
"""Names that programs with a launcher of their own import."""
