#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs a step that somebody watches: two ranks, with the page and without, in turns.

Each round runs the same job twice, in changing order. With the page, a client reads its events the
whole time, as a browser does. Prints the ratio of step times of each round, and their median.

    python3 bench/watched.py BUILD-DIRECTORY [--rounds 8] [--seconds 5]
"""
import argparse
import http.client
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Half a millisecond of work, then gradients of 256 KiB.
JOB = """
import array, sys, time
from horovod import _core
from horovod.common import basics as hvd
hvd.init()
data = array.array("f", [1.0]) * 16384
def step(number):
    until = time.perf_counter() + 0.0005
    while time.perf_counter() < until:
        pass
    for handle in [_core.submit(op=_core.ALLREDUCE, name=f"g{i}", dtype=_core.FLOAT32,
                                reduce=_core.SUM, inputs=data, outputs=data) for i in range(4)]:
        handle.wait()
    hvd.report(step=number, samples=64)
times = []
end = time.perf_counter() + float(sys.argv[1])
flag = array.array("f", [0.0])
number = 0
while not flag[0]:
    began = time.perf_counter()
    for _ in range(50):
        step(number := number + 1)
    times.append((time.perf_counter() - began) / 50)
    flag[0] = time.perf_counter() > end
    _core.submit(op=_core.ALLREDUCE, name="end", dtype=_core.FLOAT32, reduce=_core.MAX,
                 inputs=flag, outputs=flag).wait()
if hvd.rank() == 0:
    print("step", sorted(times)[len(times) // 2])
"""


def read_events(url):
    port, token = re.search(r":(\d+)/\?token=(\w+)", url).groups()
    connection = http.client.HTTPConnection("127.0.0.1", int(port))
    try:
        connection.request("GET", "/events", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        while answer.readline():
            pass
    except OSError:
        pass  # the job is over


def step_s(build, program, seconds, is_watched):
    words = [build / "horovodrun", "-np", "2", *(["--dashboard"] if is_watched else []),
             sys.executable, program, str(seconds)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           env={**os.environ, "PYTHONPATH": str(build / "python")})
    found = None
    for line in job.stdout:
        if "/?token=" in line:
            threading.Thread(target=read_events, args=[line], daemon=True).start()
        found = re.search(r"step ([\d.e-]+)", line) or found
    if job.wait() != 0 or found is None:
        sys.exit("watched.py: the job failed")
    return float(found[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("build", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5)
    options = parser.parse_args()
    ratios = []
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(JOB)
        program.flush()
        for number in range(options.rounds):
            order = [False, True] if number % 2 == 0 else [True, False]
            seen = {is_watched: step_s(options.build, program.name, options.seconds, is_watched)
                    for is_watched in order}
            ratios.append(seen[True] / seen[False])
            print(f"without {seen[False] * 1e3:.3f} ms, with {seen[True] * 1e3:.3f} ms, "
                  f"ratio {ratios[-1]:.3f}", flush=True)
    print(f"median of {len(ratios)} ratios: {statistics.median(ratios):.4f}")


main()
