#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions that an operation takes in the library; no more are allowed than before.

    test_cost.py BUILD            fails when an operation has become more expensive
    test_cost.py BUILD --write    writes what it has counted to instructions.list

callgrind counts, so neither load nor clock matters. What libc does does not count (it copies with
other instructions on other processors), nor what Python does around a gradient hook, nor
housekeeping, which happens by the clock.
"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LIST = Path(__file__).with_name("instructions.list")
HOOK = Path(__file__).with_name("cost_hook.py")
OWN = re.compile(r"/(cost_ops|libhvd\.so[.0-9]*|_core[^/]*\.so)$")
TIMES = 300
TOLERANCE = 0.05
TRIES = 4  # the engine's own thread may get in the way, which costs something, never less
HEAD = """# SPDX-License-Identifier: Apache-2.0
#
# Instructions of the library for one operation on one rank: operation, bytes, ranks, instructions.
# gradient_hook: from where PyTorch calls it to where it has submitted.
# `python3 tests/cost/test_cost.py build --write` counts them again; a commit that raises one says
# why.
"""


def own_cost(path, own):
    """Instructions spent in programs and libraries whose names `own` matches."""
    names = {}
    total = 0
    is_own = is_call = False
    for line in path.read_text().splitlines():
        match = re.match(r"ob=\((\d+)\)(?: (.*))?", line)
        if match:
            names.setdefault(match[1], match[2])
            is_own = own.search(names[match[1]]) is not None
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


def count(build, operation, n_bytes, ranks):
    """Of what stands between entering and leaving a function, which callgrind knows by its name."""
    functions, env = ["measured"], dict(os.environ)
    command = [build / "tests" / "cost_ops", operation, n_bytes, ranks, str(TIMES)]
    if operation == "gradient_hook":
        functions = ["hook_call"]
        command = [sys.executable, HOOK, str(TIMES), n_bytes]
        env["PYTHONPATH"] = str(build / "python")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        toggles = [f"--toggle-collect={name}" for name in functions + ["keep_house"]]
        subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--collect-atstart=no",
             *toggles, *command], check=True, stderr=subprocess.PIPE, timeout=120, env=env)
        return round(own_cost(out, OWN) / TIMES / int(ranks))


def rows():
    for line in LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            yield line.split()


def main():
    build = Path(sys.argv[1]).resolve()
    counted = []
    failed = False
    has_python = any((build / "python" / "horovod").glob("_core*.so"))
    for operation, n_bytes, ranks, allowed in rows():
        if operation == "gradient_hook" and not has_python:
            print(f"{operation}: this build has no Python extension, left out")
            counted.append((operation, n_bytes, ranks, int(allowed)))
            continue
        found = count(build, operation, n_bytes, ranks)
        for _ in range(TRIES - 1):
            if found > int(allowed) * (1 + TOLERANCE) or "--write" in sys.argv:
                found = min(found, count(build, operation, n_bytes, ranks))
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
