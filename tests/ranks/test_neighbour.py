#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks beside a busy stranger: test_neighbour.py BUILD

A process that computes all the time leaves two ranks less than two cores. The scheduler likes to
put both on the core the stranger does not have, where every exchange costs two switches. Ranks
notice and part (src/net/cores.c): a job is then as quick as one whose ranks are bound to a core
each.
"""
import json
import os
import subprocess
import sys

STARTS = 12
MAX_SLOW = STARTS // 4  # other load of the machine may still hit some
# Together on one core a tiny allreduce was 40 to 50 times, a small one 10 times as slow.
TOO_SLOW = {4: 12, 65536: 5}


def median_us(bench, size, pin):
    command = [bench, "--op", "allreduce", "--ranks", "2", "--bytes", str(size), "--budget", "0.1"]
    done = subprocess.run(command + ["--json"] + ["--pin"] * pin, capture_output=True, text=True,
                          timeout=60, check=True)
    return json.loads(done.stdout.splitlines()[-1])["median_us"]


def middle(values):
    return sorted(values)[len(values) // 2]


def main():
    bench = os.path.join(sys.argv[1], "hvd-bench")
    if len(os.sched_getaffinity(0)) < 2:
        print("skipped: ranks can only part where there are two cores")
        return 0
    slow = 0
    stranger = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for size, times in TOO_SLOW.items():
            bound = middle([median_us(bench, size, pin=True) for _ in range(5)])
            free = [median_us(bench, size, pin=False) for _ in range(STARTS)]
            late = [us for us in free if us > times * bound]
            slow += len(late) > MAX_SLOW
            print("%6d bytes: bound %.2f us; free %s: %d of %d slow" %
                  (size, bound, " ".join("%.2f" % us for us in free), len(late), STARTS))
    finally:
        stranger.kill()
        stranger.wait()
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
