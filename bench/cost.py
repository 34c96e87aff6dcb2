#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What observing costs: recorder, counters and heartbeat, and a timeline, side by side in one run.

    bench/cost.py [--rounds 7] [--budget 0.5] [--ranks 2] [--hosts 1] [--pin]

Contenders, each once in every round, in rotated order:

    bare       a build without recorder and counters (build-unrecorded, made here), and with
               HOROVOD_HEARTBEAT_INTERVAL_SECONDS=0 and HOROVOD_MONITOR=0
    default    what users get
    timeline   the same with HOROVOD_TIMELINE

A figure is the median over rounds of the middle of hvd-bench (the mean of the middle half of its
samples: a clock of 10 ns is too coarse for a median of 4 bytes); a cost is the median of the ratios
inside a round, so that what the machine does between rounds cancels out. Allowed: 5 % for 4 bytes
and 1 % for the table (the mean over the other sizes) from bare to default, 3 % from default to
timeline. The end is 1 if it was more. Needs a machine that does nothing else.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parent.parent
BARE = TOP / "build-unrecorded"
SMALL = 4
STARTS_OF_SMALL = 20  # for each round of the others: they take little time
SIZES = [SMALL, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20]
LIMITS = [  # from, to, sizes, percent
    ("bare", "default", [SMALL], 5.0),
    ("bare", "default", SIZES[1:], 1.0),
    ("default", "timeline", SIZES, 3.0),
]


def build_bare():
    if not (BARE / "build.ninja").exists():
        subprocess.run(["cmake", "-S", TOP, "-B", BARE, "-G", "Ninja", "-DCMAKE_C_COMPILER=gcc",
                        "-DCMAKE_C_FLAGS=-DHVD_UNRECORDED=1"], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", BARE, "--target", "hvd-bench"], check=True,
                   stdout=sys.stderr)


def contenders(folder):
    off = ["--env", "HOROVOD_HEARTBEAT_INTERVAL_SECONDS=0", "--env", "HOROVOD_MONITOR=0"]
    return {
        "bare": [str(BARE / "hvd-bench"), *off],
        "default": [str(TOP / "build" / "hvd-bench")],
        "timeline": [str(TOP / "build" / "hvd-bench"), "--env",
                     f"HOROVOD_TIMELINE={folder}/timeline.json"],
    }


def measure(command, sizes, args):
    """Middle microseconds by size."""
    command = command + ["--op", "allreduce", "--bytes", ",".join(map(str, sizes)), "--json",
                         "--ranks", str(args.ranks), "--hosts", str(args.hosts),
                         "--budget", str(args.budget), "--max-samples", "100000"]
    command += ["--pin"] if args.pin else []
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    output = subprocess.run(command, check=True, capture_output=True, text=True,
                            env=environment).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["bytes"]: row["middle_us"] for row in rows}


def rounds_of(sizes, n_rounds, args):
    """By size: for every round, microseconds by contender."""
    results = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as folder:
        names = list(contenders(folder).items())
        for i in range(n_rounds):
            order = names[i % len(names):] + names[:i % len(names)]
            figures = {name: measure(command, sizes, args) for name, command in order}
            for size in sizes:
                results[size].append({name: figures[name][size] for name in figures})
            print(f"{sizes[0]} to {sizes[-1]} bytes: round {i + 1} of {n_rounds}", file=sys.stderr)
    return results


def percent(rounds, before, after):
    return 100 * (statistics.median(r[after] / r[before] for r in rounds) - 1)


def show_table(results):
    print("| bytes | bare us | default us | timeline us | recorder and the rest | timeline |")
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        rounds = results[size]
        middle = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
        print(f"| {size} | {middle['bare']:.2f} | {middle['default']:.2f} | "
              f"{middle['timeline']:.2f} | {percent(rounds, 'bare', 'default'):+.1f} % | "
              f"{percent(rounds, 'default', 'timeline'):+.1f} % |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per contender and size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--pin", action="store_true")
    args = parser.parse_args()
    build_bare()
    # How the cores meet differs from start to start, by more than what is to be seen at 4 bytes.
    results = rounds_of([SMALL], STARTS_OF_SMALL * args.rounds, args)
    results |= rounds_of(SIZES[1:], args.rounds, args)
    show_table(results)
    too_much = False
    for before, after, sizes, limit in LIMITS:
        cost = statistics.mean(percent(results[size], before, after) for size in sizes)
        what = f"{sizes[0]} bytes" if len(sizes) == 1 else f"{len(sizes)} sizes"
        verdict = "ok" if cost <= limit else "TOO MUCH"
        too_much |= cost > limit
        print(f"{before} -> {after}, {what}: {cost:+.2f} %, allowed {limit:g} %: {verdict}")
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
