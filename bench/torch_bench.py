#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""horovod.torch beside torch.distributed: latencies, many tensors, training speed, on two ranks.

    bench/torch_bench.py [--rounds 5] [--tests sizes,many,resnet18] [--build build]
    bench/torch_bench.py --tests resnet50,transformer --nets local,veth10g,veth1g    (root)

Every round runs every contender of a test once, in rotated order, so that noise falls on all alike;
figures are medians over the rounds. The targets are at the end: each compares figures of this run.
Needs the Python environment the tests use (make setup), and a quiet machine to mean anything.
"""
import argparse
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from side_by_side import place_for, stop  # noqa: E402

RANKS = 2

TESTS = {  # test -> contenders
    "sizes": ["hvd", "gloo"],
    "dtypes": ["hvd", "gloo"],
    "many": ["hvd", "gloo"],
    "hook": ["hvd"],
    "resnet18": ["hvd", "ddp-gloo", "ddp-hvd", "apart", "single"],
    "resnet50": ["hvd", "ddp-gloo", "ddp-hvd", "apart"],
    "transformer": ["hvd", "ddp-gloo", "ddp-hvd", "apart"],
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
    ("ResNet-50 against DDP over Gloo", "resnet50 images/s", "hvd", ">=", 1.1, "ddp-gloo"),
    ("ResNet-50 against two that do not talk", "resnet50 images/s", "hvd", ">=", 0.98, "apart"),
    ("transformer against DDP over Gloo", "transformer words/s", "hvd", ">=", 1.1, "ddp-gloo"),
    ("transformer against two that do not talk", "transformer words/s", "hvd", ">=", 0.98, "apart"),
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


def environment(build, place):
    paths = [str(build / "python"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "",
            "PATH": os.pathsep.join([*place.path, os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def commands(build, contender, test, place):
    """[(command, environment)] of the processes to start."""
    env = environment(build, place)
    job = [sys.executable, str(HERE / "torch_job.py"), contender, test]
    if test == "import":
        return [([sys.executable, "-c", IMPORT], env)]
    if contender in ("single", "apart"):
        return [(job, env)] * (RANKS if contender == "apart" else 1)
    if contender in ("hvd", "ddp-hvd"):
        hosts = ["-H", "node1:1,node2:1"] if place.two else []
        run = [str(build / "horovodrun"), "-np", str(RANKS), *hosts, *job]
        return [(place.on(0, run), env)]
    torchs = {"MASTER_ADDR": place.NET + ".1" if place.two else "127.0.0.1",
              "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS),
              "GLOO_SOCKET_IFNAME": "eth0" if place.two else "lo"}
    return [(place.on(rank, job), {**env, **torchs, "RANK": str(rank)}) for rank in range(RANKS)]


def measure(build, contender, test, place, timeout_s):
    """figure -> value, of one run; raises if it failed."""
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
                 for command, env in commands(build, contender, test, place)]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    total = {}
    for line in "".join(outputs).splitlines():
        _, found, figures = line.partition("FIGURES ")
        for figure, value in json.loads(figures).items() if found else ():
            total[figure] = total.get(figure, 0) + value  # of several that do not talk
    if not total:
        raise RuntimeError(f"{contender} gave no figures for {test}")
    return total


def taking_part(test, net):
    """Who does not talk needs no network."""
    return [c for c in TESTS[test] if net == "local" or c not in ("apart", "single")]


def run(options):
    """(figure, contender, network) -> values over the rounds, and the loads at their beginning"""
    results, loads = {}, []
    end = time.monotonic() + 60 * options.minutes
    took = {}
    for number in range(options.rounds):
        loads.append(os.getloadavg()[0])
        for net, test in [(net, test) for net in options.nets for test in options.tests]:
            started = time.monotonic()
            if started + took.get((net, test), 0) > end:
                print(f"round {number + 1}, {net}, {test}: no time left", file=sys.stderr)
                continue
            contenders = taking_part(test, net)
            turn = number % len(contenders)
            with tempfile.TemporaryDirectory() as work, place_for(net, work) as place:
                for contender in contenders[turn:] + contenders[:turn]:
                    figures = measure(options.build, contender, test, place, options.timeout)
                    for figure, value in figures.items():
                        results.setdefault((figure, contender, net), []).append(value)
                    print(f"round {number + 1}, {net}, {test}, {contender}", file=sys.stderr)
            took[net, test] = time.monotonic() - started
    return results, loads


def save(results, loads, path):
    rows = [{"figure": figure, "contender": contender, "net": net, "rounds": len(values),
             "median": statistics.median(values), "lowest": min(values), "highest": max(values)}
            for (figure, contender, net), values in results.items()]
    path.write_text(json.dumps({"rows": rows, "rounds": len(loads), "loads": loads}, indent=1))


def report(results, net):
    figures = list(dict.fromkeys(figure for figure, _, n in results if n == net))
    contenders = list(dict.fromkeys(contender for _, contender, n in results if n == net))
    median = {key[:2]: statistics.median(values) for key, values in results.items()
              if key[2] == net}
    print(f"{net}:\n")
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
    parser.add_argument("--nets", type=lambda text: text.split(","), default=["local"],
                        help="local, veth, veth10g, veth1g: two network namespaces, as root")
    parser.add_argument("--minutes", type=float, default=float("inf"),
                        help="begin nothing that would take longer than this in all")
    parser.add_argument("--out", type=pathlib.Path, help="the figures as JSON")
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parent / "build")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run")
    options = parser.parse_args()
    unknown = [test for test in options.tests if test not in TESTS]
    if unknown:
        parser.error(f"no such test: {', '.join(unknown)}; there are {', '.join(TESTS)}")
    options.build = options.build.resolve()
    for sig in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, stop)  # and take namespaces away
    results, loads = run(options)
    if options.out:
        save(results, loads, options.out)
    for net in options.nets:
        report(results, net)


if __name__ == "__main__":
    main()
