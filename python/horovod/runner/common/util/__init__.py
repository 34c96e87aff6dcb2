# SPDX-License-Identifier: Apache-2.0
"""Names that users of the launcher import."""
