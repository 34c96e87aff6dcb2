#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The simulator against this machine: every rank a host of its own, over TCP, all on these cores.

    scale_check.py build/hvd-bench [--rounds 5]

What a message and a byte cost is measured with two ranks; then more ranks are run and simulated.
Rounds are interleaved; a row has the medians. Standard library only.
"""

import argparse
import json
import os
import statistics
import subprocess

ROWS = [("barrier", 0), ("allreduce", 4), ("allreduce", 1 << 16), ("allreduce", 1 << 20),
        ("allreduce", 1 << 24), ("allgather", 1 << 16), ("broadcast", 1 << 20)]
RANKS = (2, 3, 4, 8, 16)
ADDED = 1 / 20  # nanoseconds to add a byte to another, in cache


def run(command):
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def measured(bench, op, size, ranks):
    return run([bench, "--op", op, "--bytes", str(size), "--ranks", str(ranks), "--hosts",
                str(ranks), "--transport", "tcp", "--encrypt", "never", "--budget", "0.3",
                "--json"])["median_us"]


def simulated(bench, op, size, ranks, message_us, gigabytes):
    return run([bench, "--simulate", str(ranks), "--per-host", "1", "--cores",
                str(os.cpu_count()), "--op", op, "--bytes", str(size), "--network",
                f"0,{message_us},{gigabytes}", "--memory", f"0,0,{1 / ADDED}",
                "--json"])["total_us"]


def speed(bench, size, wanted_us, message_us):
    """gigabytes a second at which two ranks need so long, by halving the interval"""
    low, high = 0.01, 1000
    for _ in range(40):
        middle = (low * high) ** 0.5
        slow = simulated(bench, "allreduce", size, 2, message_us, middle) > wanted_us
        low, high = (middle, high) if slow else (low, middle)
    return low


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("bench")
    ap.add_argument("--rounds", type=int, default=5)
    opts = ap.parse_args()
    times = {(row, ranks): [] for row in ROWS for ranks in RANKS}
    for _ in range(opts.rounds):
        for (op, size), ranks in times:
            times[(op, size), ranks].append(measured(opts.bench, op, size, ranks))
    real = {key: statistics.median(values) for key, values in times.items()}
    message_us = real[ROWS[0], 2] / 4  # there and back; a core sends and a core receives
    gigabytes = speed(opts.bench, 1 << 24, real[("allreduce", 1 << 24), 2], message_us)
    print(f"load {os.getloadavg()[0]:.1f}; a message {message_us:.2f} us at each end, "
          f"{gigabytes:.2f} GB/s\n")
    print("| operation | bytes | " + " | ".join(f"{n} ranks" for n in RANKS) + " |")
    print("|---" * (2 + len(RANKS)) + "|")
    for op, size in ROWS:
        cells = []
        for ranks in RANKS:
            us = simulated(opts.bench, op, size, ranks, message_us, gigabytes)
            cells.append(f"{real[(op, size), ranks]:.4g} / {us:.4g}")
        print(f"| {op} | {size} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
