#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""horovod.torch beside torch.distributed: latencies, many tensors, training speed, on two ranks.

    bench/torch_bench.py [--rounds 5] [--tests sizes,many,resnet18] [--build build]

Every round runs every contender of a test once, in rotated order, so that noise falls on all alike;
figures are medians over the rounds. The targets are at the end: each compares figures of this run.
Needs the Python environment the tests use (make setup), and a quiet machine to mean anything.
"""
import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
RANKS = 2

TESTS = {  # test -> contenders
    "sizes": ["hvd", "gloo"],
    "dtypes": ["hvd", "gloo"],
    "many": ["hvd", "gloo"],
    "hook": ["hvd"],
    "resnet18": ["hvd", "ddp-gloo", "ddp-hvd", "single"],
    "resnet50": ["hvd", "ddp-gloo", "ddp-hvd", "single"],
    "import": ["hvd"],
}

TARGETS = [  # what, figure, contender, at most or at least, factor, of whom (None: absolute)
    ("allreduce_ of 4 B", "allreduce 4 B us", "hvd", "<=", 10, None),
    ("allreduce_ of 4 B, 30 times faster than Gloo", "allreduce 4 B us", "hvd", "<=", 1 / 30,
     "gloo"),
    ("500 tensors of 10 KiB", "500 x 10 KiB us", "hvd", "<=", 4000, None),
    ("gradient hook", "gradient hook us", "hvd", "<=", 3, None),
    ("import horovod.torch over import torch", "import ms", "hvd", "<=", 50, None),
    ("ResNet-18 against DDP over Gloo", "resnet18 images/s", "hvd", ">=", 1.05, "ddp-gloo"),
    ("ResNet-50 against DDP over Gloo", "resnet50 images/s", "hvd", ">=", 1.0, "ddp-gloo"),
    ("ResNet-18, DDP on our backend", "resnet18 images/s", "ddp-hvd", ">=", 1.0, "ddp-gloo"),
    ("ResNet-50, DDP on our backend", "resnet50 images/s", "ddp-hvd", ">=", 1.0, "ddp-gloo"),
]

IMPORT = """
import time, torch
started = time.perf_counter()
import horovod.torch
print("FIGURES {\\"import ms\\": %f}" % (1e3 * (time.perf_counter() - started)))
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(build):
    paths = [str(build / "python"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def commands(build, contender, test):
    """[(command, environment)] of the processes to start."""
    env = environment(build)
    job = [sys.executable, str(HERE / "torch_job.py"), contender, test]
    if test == "import":
        return [([sys.executable, "-c", IMPORT], env)]
    if contender == "single":
        return [(job, env)]
    if contender in ("hvd", "ddp-hvd"):
        return [([str(build / "horovodrun"), "-np", str(RANKS), *job], env)]
    torchs = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    return [(job, {**env, **torchs, "RANK": str(rank)}) for rank in range(RANKS)]


def measure(build, contender, test, timeout_s):
    """figure -> value, of one run; raises if it failed."""
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
                 for command, env in commands(build, contender, test)]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for line in "".join(outputs).splitlines():
        _, found, figures = line.partition("FIGURES ")
        if found:
            return json.loads(figures)
    raise RuntimeError(f"{contender} gave no figures for {test}")


def run(options):
    """(figure, contender) -> values over the rounds"""
    results = {}
    for number in range(options.rounds):
        for test in options.tests:
            contenders = TESTS[test]
            turn = number % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                figures = measure(options.build, contender, test, options.timeout)
                for figure, value in figures.items():
                    results.setdefault((figure, contender), []).append(value)
                print(f"round {number + 1}, {test}, {contender}", file=sys.stderr)
    return results


def report(results):
    figures = list(dict.fromkeys(figure for figure, _ in results))
    contenders = list(dict.fromkeys(contender for _, contender in results))
    median = {key: statistics.median(values) for key, values in results.items()}
    print("| | " + " | ".join(contenders) + " |")
    print("|---|" + "---:|" * len(contenders))
    for figure in figures:
        cells = [f"{median[figure, c]:.1f}" if (figure, c) in median else "-" for c in contenders]
        print(f"| {figure} | " + " | ".join(cells) + " |")
    print()
    for what, figure, contender, sense, factor, other in TARGETS:
        ours, base = median.get((figure, contender)), 1.0
        if other is not None:
            base = median.get((figure, other))
        if ours is None or base is None:
            continue
        reached = ours <= factor * base if sense == "<=" else ours >= factor * base
        print(f"{'reached' if reached else 'MISSED '}  {what}: {ours:.1f}, "
              f"target {sense} {factor * base:.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tests", type=lambda text: text.split(","), default=list(TESTS))
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parent / "build")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    options = parser.parse_args()
    unknown = [test for test in options.tests if test not in TESTS]
    if unknown:
        parser.error(f"no such test: {', '.join(unknown)}; there are {', '.join(TESTS)}")
    options.build = options.build.resolve()
    report(run(options))


if __name__ == "__main__":
    main()
