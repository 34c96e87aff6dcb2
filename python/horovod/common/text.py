# SPDX-License-Identifier: Apache-2.0
"""What messages have in common."""


def counted(n, noun):
    """"1 rank", "2 ranks"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
