#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the table of values for the chart's README: values_table.py values.yaml

A line "# -- text" describes the key below it.
"""
import re
import sys


def rows(lines):
    path, text = [], None
    for line in lines:
        comment = re.match(r"\s*# -- (.*)", line)
        key = re.match(r"( *)([A-Za-z]+):\s*(.*)", line)
        if comment:
            text = comment.group(1)
        elif key:
            path = path[:len(key.group(1)) // 2] + [key.group(2)]
            if text is not None:
                yield ".".join(path), text, key.group(3)
            text = None


def main():
    with open(sys.argv[1]) as file:
        print("| Parameter | Description | Default |\n|---|---|---|")
        for name, text, default in rows(file):
            print("| `%s` | %s | `%s` |" % (name, text, default))


main()
