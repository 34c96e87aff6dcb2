# SPDX-License-Identifier: Apache-2.0
"""Lets every test module import the helpers of this folder."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
