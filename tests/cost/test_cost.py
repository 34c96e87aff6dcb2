#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions that an operation takes in the library; no more are allowed than before.

    test_cost.py BUILD            fails when an operation has become more expensive
    test_cost.py BUILD --write    writes what it has counted to instructions.list

callgrind counts, so neither load nor clock matters. What libc does does not count (it copies with
other instructions on other processors), nor does housekeeping, which happens by the clock.
"""
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LIST = Path(__file__).with_name("instructions.list")
TIMES = 300
TOLERANCE = 0.05
TRIES = 4  # the engine's own thread may get in the way, which costs something, never less
HEAD = """# SPDX-License-Identifier: Apache-2.0
#
# Instructions of the library for one operation on one rank: operation, bytes, ranks, instructions.
# `python3 tests/cost/test_cost.py build --write` counts them again; a commit that raises one says
# why.
"""


def own_cost(path, program):
    """Instructions spent in the program itself, of a file that callgrind wrote."""
    names = {}
    total = 0
    is_own = is_call = False
    for line in path.read_text().splitlines():
        match = re.match(r"ob=\((\d+)\)(?: (.*))?", line)
        if match:
            names.setdefault(match[1], match[2])
            is_own = names[match[1]] == str(program)
        elif re.match(r"c(fi|fl|fn)=", line):
            continue
        elif line.startswith("cob="):
            match = re.match(r"cob=\((\d+)\)(?: (.*))?", line)
            names.setdefault(match[1], match[2])
        elif line.startswith("calls="):
            is_call = True
        elif re.match(r"[+*\-\d]", line):
            if is_own and not is_call:
                total += int(line.split()[1])
            is_call = False
    return total


def count(program, operation, n_bytes, ranks):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--collect-atstart=no",
             "--toggle-collect=measured", "--toggle-collect=keep_house", program, operation,
             n_bytes, ranks, str(TIMES)], check=True, stderr=subprocess.PIPE, timeout=120)
        return round(own_cost(out, program) / TIMES / int(ranks))


def rows():
    for line in LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            yield line.split()


def main():
    program = Path(sys.argv[1]).resolve() / "tests" / "cost_ops"
    counted = []
    failed = False
    for operation, n_bytes, ranks, allowed in rows():
        found = count(program, operation, n_bytes, ranks)
        for _ in range(TRIES - 1):
            if found > int(allowed) * (1 + TOLERANCE) or "--write" in sys.argv:
                found = min(found, count(program, operation, n_bytes, ranks))
        counted.append((operation, n_bytes, ranks, found))
        is_more = found > int(allowed) * (1 + TOLERANCE)
        is_less = found < int(allowed) * (1 - TOLERANCE)
        verdict = "MORE" if is_more else "less: lower the number" if is_less else "as allowed"
        print(f"{operation} of {n_bytes} bytes, {ranks} ranks: {found} instructions, "
              f"{allowed} allowed: {verdict}")
        failed |= is_more
    if "--write" in sys.argv:
        lines = ["%-14s %7s %2s %6d" % row for row in counted]
        LIST.write_text(HEAD + "\n".join(lines) + "\n")
        return 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
