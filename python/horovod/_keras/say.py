# SPDX-License-Identifier: Apache-2.0
"""What users are told in the log: every sentence once."""
import functools
import logging

_log = logging.getLogger("horovod")


@functools.lru_cache(maxsize=None)
def say_once(text):
    """Warns, unless the same has been said before."""
    _log.warning("%s", text)
