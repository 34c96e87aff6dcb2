# SPDX-License-Identifier: Apache-2.0
"""Waiting with an end: the time that is left, and the exception for what did not happen in it."""
import time


class TimeoutException(Exception):
    """Something that was waited for did not happen in time."""


class Timeout:
    """So many seconds from now on. message may have {activity} in it: what was waited for."""

    def __init__(self, timeout, message):
        self._seconds = timeout
        self._message = message
        self._end = time.monotonic() + timeout

    def remaining(self):
        """Seconds that are left, 0 at least."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self):
        return self.remaining() == 0

    def check_time_out_for(self, activity):
        """TimeoutException if no time is left."""
        if self.timed_out():
            text = self._message.format(activity=activity)
            raise TimeoutException(f"{text} Timeout after {self._seconds} seconds.")
