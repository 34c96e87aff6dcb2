#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What looking on costs: recorder, counters and heartbeat, and a timeline, side by side in one run.

    bench/cost.py [--rounds 7] [--budget 0.5] [--ranks 2] [--hosts 1] [--pin]

Contenders, each once in every round, in rotated order:

    bare       a build without recorder and counters (build-unrecorded, made here), and with
               HOROVOD_HEARTBEAT_INTERVAL_SECONDS=0 and HOROVOD_MONITOR=0
    default    what users get
    timeline   the same with HOROVOD_TIMELINE

A figure is the median over rounds of the medians of hvd-bench; a cost is the median of the ratios
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


def measure(command, args):
    """Median microseconds by size."""
    command = command + ["--op", "allreduce", "--bytes", ",".join(map(str, SIZES)), "--json",
                         "--ranks", str(args.ranks), "--hosts", str(args.hosts),
                         "--budget", str(args.budget)] + (["--pin"] if args.pin else [])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_")}
    output = subprocess.run(command, check=True, capture_output=True, text=True,
                            env=environment).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["bytes"]: row["median_us"] for row in rows}


def rounds_of(args):
    results = []
    with tempfile.TemporaryDirectory() as folder:
        names = list(contenders(folder).items())
        for i in range(args.rounds):
            order = names[i % len(names):] + names[:i % len(names)]
            results.append({name: measure(command, args) for name, command in order})
            print(f"round {i + 1} of {args.rounds}", file=sys.stderr)
    return results


def percent(results, before, after, size):
    return 100 * (statistics.median(r[after][size] / r[before][size] for r in results) - 1)


def show_table(results):
    print("| bytes | bare us | default us | timeline us | recorder and the rest | timeline |")
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        middle = {name: statistics.median(r[name][size] for r in results) for name in results[0]}
        print(f"| {size} | {middle['bare']:.2f} | {middle['default']:.2f} | "
              f"{middle['timeline']:.2f} | {percent(results, 'bare', 'default', size):+.1f} % | "
              f"{percent(results, 'default', 'timeline', size):+.1f} % |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per contender and size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--pin", action="store_true")
    args = parser.parse_args()
    build_bare()
    results = rounds_of(args)
    show_table(results)
    too_much = False
    for before, after, sizes, limit in LIMITS:
        cost = statistics.mean(percent(results, before, after, size) for size in sizes)
        what = f"{sizes[0]} bytes" if len(sizes) == 1 else f"{len(sizes)} sizes"
        verdict = "ok" if cost <= limit else "TOO MUCH"
        too_much |= cost > limit
        print(f"{before} -> {after}, {what}: {cost:+.2f} %, allowed {limit:g} %: {verdict}")
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
