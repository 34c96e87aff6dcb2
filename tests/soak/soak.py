#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Faults at random, one after another, in jobs that train: does each go on, or end as it should?

Usage, as root: soak.py BUILD-DIRECTORY [--faults 240] [--seconds 3600] [--seed 1] [--out FOLDER]

Three hosts in network namespaces, reached by ssh, with a rank each. An elastic job of PyTorch has
to go on after every fault; one of fixed size, of PyTorch or Keras, has to end, say why, and leave
nothing. The seed decides what happens to whom, and when; a fault that finds a mistake is named with
the seed and its number. The ranks check every sum and every weight (train.py). FOLDER gets a row a
fault (faults.jsonl), the output of jobs that did wrong, and a table and a picture of how long the
jobs took to go on or to end.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/launch"), str(ROOT / "bench")]

from launching import BUILD, HOROVODRUN, Job, command_line, eventually, variable  # noqa: E402
from world import World, sh  # noqa: E402

HOSTS = {"a": ("eth7", ""), "b": ("net3", ""), "c": ("ib9", "")}
PYTHON = ROOT / ".venv/bin/python"
STEP = re.compile(r"step (\d+) rank (\d+) of (\d+) on (\S+)")
HANG_S = 180  # a job that has not gone on, or ended, by then hangs; the machine may be busy
HEARTBEAT_S = 3
TOGETHER = 8  # faults to one elastic job


class Running:
    """A job of the soak and what it has printed."""

    def __init__(self, world, folder, framework, kind):
        self.world, self.folder, self.kind = world, pathlib.Path(folder), kind
        self.lines, self.begun = [], time.monotonic()
        self.list_hosts(*HOSTS)
        script = self.folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
        script.chmod(0o755)
        words = ["--ssh-command", f"ssh -F {world.config()}", "-np", 3,
                 "--gloo-timeout-seconds", 10]
        words += (["--min-np", 1, "--host-discovery-script", script, "--elastic-restarts", 0,
                   "--blacklist-cooldown-range", 1, 2] if kind == "elastic" else
                  ["-H", ",".join(f"{host}:1" for host in HOSTS)])
        self.job = Job(*words, PYTHON, ROOT / "tests/soak/train.py", self.folder, framework, kind,
                       before=world.inside("launcher"), cwd=folder,
                       env={"PYTHONPATH": str(BUILD / "python"), "OMP_NUM_THREADS": "1",
                            "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "",
                            "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": str(HEARTBEAT_S)})
        self.readers = [threading.Thread(target=self._read, args=(stream,), daemon=True)
                        for stream in (self.job.process.stdout, self.job.process.stderr)]
        for reader in self.readers:
            reader.start()

    def _read(self, stream):
        for line in stream:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip("\n")))
        stream.close()

    def text(self, after=0):
        return "\n".join(line for _, line in self.lines[after:])

    def list_hosts(self, *hosts):
        draft = self.folder / "hosts.new"
        draft.write_text("".join(f"{host}:1\n" for host in hosts))
        draft.rename(self.folder / "hosts")

    def steps(self, after=0):
        """(when, step, size, host)"""
        found = [(when, STEP.search(line)) for when, line in list(self.lines[after:])]
        return [(when, int(m[1]), int(m[3]), m[4]) for when, m in found if m]

    def rank_on(self, host):
        """Its process, and its number."""
        for pid in self.world.processes(host):
            if b"train.py" in command_line(pid) and variable(pid, "HOROVOD_RANK"):
                said = [STEP.search(line) for _, line in self.lines[-300:]]
                rank = next((int(m[2]) for m in said[::-1] if m and m[4] == host), None)
                return pid, rank
        return None, None

    def agent_on(self, host):
        return next((pid for pid in self.world.processes(host)
                     if b"--agent" in command_line(pid) and b"supervisor" not in
                     pathlib.Path(f"/proc/{pid}/comm").read_bytes()), None)

    def await_size(self, size, after=0, seconds=HANG_S):
        return eventually(lambda: self.job.process.poll() is not None or any(
            step[2] == size for step in self.steps(after)), seconds)

    def wait(self):
        """The exit code; None: it hangs."""
        try:
            code = self.job.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            return None
        for reader in self.readers:
            reader.join(10)
        return code


# --- Faults --------------------------------------------------------------------------------------

Fault = collections.namedtuple("Fault", "name inject kinds says code heal goes_on",
                               defaults=(None, None, False))


def to_rank(signo):
    def inject(running, host):
        os.kill(running.rank_on(host)[0], signo)
    return inject


def to_agent(signo):
    def inject(running, host):
        os.kill(running.agent_on(host), signo)
        if signo == signal.SIGTERM:
            running.list_hosts(*(name for name in HOSTS if name != host))
    return inject


def to_launcher(signo):
    return lambda running, host: os.kill(running.job.process.pid, signo)


def order(what):
    return lambda running, host: (running.folder / f"{what}.{host}").touch()


def cut(running, host):
    running.world.set_link(host, "down")


def mend(running, host):
    running.world.set_link(host, "up")


def slow(running, host):
    sh(*running.world.inside(host), "tc", "qdisc", "add", "dev", HOSTS[host][0], "root", "netem",
       "delay", "20ms", "10ms", "loss", "2%")


def fast(running, host):
    sh(*running.world.inside(host), "tc", "qdisc", "del", "dev", HOSTS[host][0], "root")


def stop_briefly(running, host):
    pid, _ = running.rank_on(host)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(pid, signal.SIGCONT)


def blink(running, host):
    cut(running, host)
    time.sleep(1)
    mend(running, host)


def two_at_once(running, host):
    for name in [host, *[name for name in HOSTS if name != host][:1]]:
        os.kill(running.rank_on(name)[0], signal.SIGKILL)


def again_in_recovery(running, host):
    os.kill(running.rank_on(host)[0], signal.SIGKILL)
    time.sleep(0.4)
    other = next(name for name in HOSTS if name != host)
    os.kill(running.rank_on(other)[0], signal.SIGKILL)


def kill_supervisor(running, host):
    for pid in running.world.processes(host):
        if pathlib.Path(f"/proc/{pid}/comm").read_bytes().startswith(b"hvd-supervisor"):
            os.kill(pid, signal.SIGKILL)


def unlist(running, host):
    running.list_hosts(*(name for name in HOSTS if name != host))


def relist(running, host):
    running.list_hosts(*HOSTS)


BOTH, ELASTIC, FIXED = ("elastic", "fixed"), ("elastic",), ("fixed",)
# {r} and {h}: rank and host. goes_on: nobody may be lost. code: of a job of fixed size.
FAULTS = [
    Fault("rank killed", to_rank(signal.SIGKILL), BOTH,
          r"rank {r} failed|because of rank {r}:.*signal 9", 137),
    Fault("rank raises an exception", order("raise"), BOTH,
          r"rank {r} failed|because of rank {r}: it raised RuntimeError", 1),
    Fault("rank gets no memory", order("memory"), BOTH,
          r"rank {r} failed|because of rank {r}: it raised MemoryError", 1),
    Fault("rank stopped (SIGSTOP)", to_rank(signal.SIGSTOP), BOTH,
          r"rank {r} failed|because of rank {r}:", 137),
    Fault("rank ends early, exit code 0", order("exit"),
          FIXED,
          r"rank {r}\b.*(ended|left|exit)", None),
    Fault("agent killed", to_agent(signal.SIGKILL), BOTH, r"agent on host {h}|host {h}", None),
    Fault("host told to go (SIGTERM)", to_agent(signal.SIGTERM), ELASTIC,
          r"host {h} is about to go", None, relist),
    Fault("host not listed any more", unlist, ELASTIC,
          r"generation \d+ of the job has 2 ranks", None, relist),
    Fault("network of a host cut", cut, BOTH, r"host {h}\b", None, mend),
    Fault("two ranks killed at once", two_at_once, BOTH, r"rank \d+ failed|because of rank", 137),
    Fault("another killed in the recovery", again_in_recovery, ELASTIC, r"rank {r} failed", None),
    Fault("rank stopped for 1 s", stop_briefly, BOTH, None, goes_on=True),
    Fault("network away for 1 s", blink, BOTH, None, goes_on=True),
    Fault("slow network that loses packets", slow, BOTH, None, None, fast, True),
    Fault("supervisor of an agent killed", kill_supervisor, BOTH, None, goes_on=True),
    Fault("launcher interrupted", to_launcher(signal.SIGINT), FIXED, r"got SIGINT", 130),
    Fault("launcher terminated", to_launcher(signal.SIGTERM), BOTH, r"got SIGTERM", 143),
    Fault("launcher killed", to_launcher(signal.SIGKILL), BOTH, None, -9),
]
ENDS_ALL = ("launcher interrupted", "launcher terminated", "launcher killed")


# --- One fault -----------------------------------------------------------------------------------

class Soak:
    def __init__(self, arguments, world):
        self.arguments, self.world = arguments, world
        self.random = random.Random(arguments.seed)
        self.end = time.monotonic() + arguments.seconds
        self.rows = []
        self.out = pathlib.Path(arguments.out)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "faults.jsonl").write_text("")

    def is_over(self):
        return len(self.rows) >= self.arguments.faults or time.monotonic() >= self.end

    def note(self, running, fault, kind, framework, host, seconds, problems):
        row = {"seed": self.arguments.seed, "number": len(self.rows) + 1, "fault": fault.name,
               "job": kind, "framework": framework, "host": host,
               "seconds": None if seconds is None else round(seconds, 2), "problems": problems}
        self.rows.append(row)
        with open(self.out / "faults.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if problems:
            (self.out / f"fault-{row['number']}.log").write_text(running.text())
        took = "-" if seconds is None else f"{seconds:6.1f} s"
        print(f"{row['number']:4} {kind:8}{framework:6} {fault.name:34} {host}  {took}  "
              f"{'; '.join(problems)}", flush=True)

    def inject(self, running, fault, host):
        """The moment, the rank, and how much it had said."""
        time.sleep(self.random.random())
        rank, said = running.rank_on(host)[1], len(running.lines)
        begun = time.monotonic()
        fault.inject(running, host)
        return begun, rank, said

    def is_named(self, fault, rank, host, text):
        if fault.says is None:
            return True
        return re.search(fault.says.format(r=rank, h=host), text) is not None

    def goes_on(self, running, fault, host):
        """(seconds, problems): an elastic job, or one that nothing should happen to."""
        begun, rank, said = self.inject(running, fault, host)
        sizes = {3} if fault.goes_on else {1, 2, 3}
        changed = eventually(lambda: running.job.process.poll() is not None or fault.goes_on or
                             "generation" in running.text(said), HANG_S)
        mark = next((i for i in range(said, len(running.lines))
                     if "generation" in running.lines[i][1]), said)
        settle = time.monotonic() + (1.5 if fault.goes_on else 0)

        def is_on():
            return time.monotonic() > settle and any(
                size in sizes and when > begun for when, _, size, _ in running.steps(mark))

        went_on = changed and eventually(
            lambda: running.job.process.poll() is not None or is_on(), HANG_S)
        after = [when for when, _, size, _ in running.steps(mark) if when > begun]
        problems = []
        if running.job.process.poll() is not None:
            problems.append(f"the job ended with {running.job.process.poll()}")
        elif not went_on:
            problems.append("HANG")
        if fault.heal:
            fault.heal(running, host)
        if fault.goes_on and "generation" in running.text(said):
            problems.append("a rank was given up")
        if not self.is_named(fault, rank, host, running.text(said)):
            problems.append("cause not named")
        if not problems and not running.await_size(3, len(running.lines)):
            problems.append("never three ranks again")
        return (after[0] - begun if after and not fault.goes_on else None), problems

    def ends(self, running, fault, host):
        begun, rank, said = self.inject(running, fault, host)
        code = running.wait()
        seconds = time.monotonic() - begun
        problems = ["HANG"] if code is None else []
        if fault.code is not None and code != fault.code:
            problems.append(f"exit code {code}, not {fault.code}")
        if code == 0:
            problems.append("exit code 0")
        if fault.heal:
            fault.heal(running, host)
        if not self.is_named(fault, rank, host, running.text(said)):
            problems.append("cause not named")
        return seconds, problems

    # --- Jobs ---

    def leftovers(self, running):
        """What the job has left: processes, sockets, files."""
        eventually(lambda: not any(self.world.processes(host) for host in HOSTS), 30)
        left = [f"left on {host}: {command_line(pid)[:80]}" for host in HOSTS
                for pid in self.world.processes(host)]
        left += [f"left: {what}"[:100] for what in running.job.left_behind(10)]
        left += [f"left: {path}" for place in ("/dev/shm", "/tmp")
                 for path in pathlib.Path(place).glob("hvd-agent-*") if self.is_ours(path)]
        return left

    def is_ours(self, path):
        """Others may use this machine: what came while this job ran, and nobody holds."""
        try:
            return path.stat().st_ctime > self.begun and subprocess.run(
                ["flock", "--nonblock", path, "true"], check=False).returncode == 0
        except OSError:
            return False

    def start(self, kind, framework, folder):
        self.begun = time.time()
        running = Running(self.world, folder, framework, kind)
        if not running.await_size(3) or running.job.process.poll() is not None:
            raise SystemExit(f"soak: a job did not start:\n{running.text()}")
        return running

    def run_fixed(self, folder):
        framework = self.random.choice(["torch", "torch", "keras"])
        fault = self.random.choice([fault for fault in FAULTS if "fixed" in fault.kinds])
        host = self.random.choice(list(HOSTS))
        running = self.start("fixed", framework, folder)
        if fault.goes_on:
            seconds, problems = self.goes_on(running, fault, host)
            problems += self.finish(running)
        else:
            seconds, problems = self.ends(running, fault, host)
        problems += self.wrong(running) + self.leftovers(running)
        self.note(running, fault, "fixed", framework, host, seconds, problems)

    def run_elastic(self, folder):
        faults = [fault for fault in FAULTS if "elastic" in fault.kinds]
        running = self.start("elastic", "torch", folder)
        for turn in range(TOGETHER):
            choices = [fault for fault in faults if fault.name not in ENDS_ALL]
            fault = self.random.choice(choices if turn + 1 < TOGETHER else faults)
            host = self.random.choice(list(HOSTS))
            if fault.name in ENDS_ALL:
                seconds, problems = self.ends(running, fault, host)
            else:
                seconds, problems = self.goes_on(running, fault, host)
            is_last = (fault.name in ENDS_ALL or problems or turn + 1 == TOGETHER or
                       len(self.rows) + 1 >= self.arguments.faults or
                       time.monotonic() >= self.end)
            if is_last:
                problems += self.finish(running) if fault.name not in ENDS_ALL else []
                problems += self.wrong(running) + self.leftovers(running)
            self.note(running, fault, "elastic", "torch", host, seconds, problems)
            if is_last:
                return

    def finish(self, running):
        (running.folder / "over").touch()
        code = running.wait()
        return [] if code == 0 else [f"did not finish well: {code}"]

    def wrong(self, running):
        return ["WRONG RESULT"] if "WRONG" in running.text() else []

    def run(self):
        while not self.is_over():
            with tempfile.TemporaryDirectory(prefix="hvd-soak-") as folder:
                (self.run_elastic if self.random.random() < 0.4 else self.run_fixed)(folder)


# --- What was seen -------------------------------------------------------------------------------

def at(values, part):
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def table(rows):
    lines = ["| fault | job | times | median | longest |", "|---|---|---|---|---|"]
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["fault"], row["job"]].append(row["seconds"])
    for (fault, job), seconds in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        known = [s for s in seconds if s is not None]
        cells = [f"{at(known, 0.5):.1f} s", f"{max(known):.1f} s"] if known else ["-", "-"]
        lines.append(f"| {fault} | {job} | {len(seconds)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def picture(rows, path):
    """Every fault that has a time is a dot in the row of its kind; seconds from left to right."""
    shown = [row for row in rows if row["seconds"] is not None]
    names = sorted({(row["job"], row["fault"]) for row in shown})
    most = max([10, *(row["seconds"] for row in shown)])
    width, left, line = 760, 300, 20
    height = line * len(names) + 50
    scale = (width - left - 20) / most
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
             'font-family="sans-serif" font-size="12" fill="#444">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    for tick in range(0, int(most) + 1, 5 if most <= 60 else 20):
        x = left + tick * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height - 30}" stroke="#ddd"/>'
                     f'<text x="{x:.1f}" y="{height - 12}" text-anchor="middle">{tick} s</text>')
    for i, (job, fault) in enumerate(names):
        y = 22 + i * line
        color = "#1f77b4" if job == "elastic" else "#d62728"
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{fault}, {job}</text>')
        parts += [f'<circle cx="{left + row["seconds"] * scale:.1f}" cy="{y}" r="4" fill="{color}" '
                  'fill-opacity="0.5"/>' for row in shown
                  if (row["job"], row["fault"]) == (job, fault)]
    path.write_text("\n".join([*parts, "</svg>", ""]))


def summary(rows):
    of = collections.Counter(problem.split(":")[0] for row in rows for problem in row["problems"])
    named = [row for row in rows if "cause not named" not in row["problems"]]
    bad = [row for row in rows if row["problems"]]
    lines = [f"{len(rows)} faults, {len(bad)} with problems, {of['HANG']} hangs, "
             f"{of['WRONG RESULT']} wrong results, cause named in {len(named)} of {len(rows)}"]
    lines += [f"  seed {row['seed']}, fault {row['number']}: {row['fault']} ({row['job']}): "
              f"{'; '.join(row['problems'])}" for row in bad]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("--faults", type=int, default=240)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=str(BUILD / "soak"))
    arguments = parser.parse_args()
    print(f"soak of {HOROVODRUN}: seed {arguments.seed}", flush=True)
    world = World(HOSTS)
    soak = Soak(arguments, world)
    try:
        soak.run()
    finally:
        world.close()
        if soak.rows:
            text = summary(soak.rows)
            (soak.out / "summary.md").write_text(f"{table(soak.rows)}\n\n{text}\n")
            picture(soak.rows, soak.out / "soak.svg")
            print(f"\n{table(soak.rows)}\n\n{text}\nin {soak.out}", flush=True)
    raise SystemExit(any(row["problems"] for row in soak.rows))


if __name__ == "__main__":
    main()
