# SPDX-License-Identifier: Apache-2.0
"""The exception for what did not happen in time."""


class TimeoutException(Exception):
    """Something that was waited for did not happen in time."""
