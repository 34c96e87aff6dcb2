# SPDX-License-Identifier: Apache-2.0
"""What launchers do with the environment."""
import os
import re

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]

# Variables of this host and of this shell: they mean nothing, or harm, where ranks are.
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY"}

# Who may have said which rank this is, first come first.
_SAID_BY = [("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("PMI_RANK", "PMI_SIZE")]


def is_exportable(name):
    """Should a variable of this name be given to the ranks?"""
    return not any(re.fullmatch(pattern, name) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size():
    """(rank, size) as the launcher has said in the environment; (0, 1) if there was none."""
    for names in _SAID_BY:
        given = [os.environ.get(name) for name in names]
        if all(value is not None for value in given):
            return int(given[0]), int(given[1])
        if any(value is not None for value in given):
            raise RuntimeError(f"Could not determine process rank and size: only one of {names[0]} "
                               f"and {names[1]} is set; set both or neither")
    return 0, 1
