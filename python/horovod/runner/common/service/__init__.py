# SPDX-License-Identifier: Apache-2.0
"""Small servers that processes of different jobs meet at."""
