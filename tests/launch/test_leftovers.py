#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a job, nothing of it is left: seen from namespaces of its own.

Each job runs in namespaces of processes, IPC, network and mounts that nobody else is in, so that
everything that is there after the fault, and was not before, is the job's: processes, files in
/dev/shm, /run and /tmp, shared memory, sockets. Its ranks use the library all the time.

Usage: test_leftovers.py BUILD-DIRECTORY [unittest arguments]     (as root)
"""
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from launching import BUILD, ROOT, SLACK, Job, command_line, eventually, main, process_ids, read, \
    variable

INSIDE = "--inside"
PATIENCE_S = 30 * SLACK
GONE_S = 15 * SLACK  # a time for SIGTERM, one for SIGKILL, and a moment
RANK = [sys.executable, ROOT / "tests/launch/elastic_rank.py"]
N_RANKS = 2


def is_supervisor(pid):
    return b"supervisor" in read(pid, "comm")


class Scene:
    """A job of two ranks that count steps, in namespaces of its own: this process is the first."""

    def __init__(self, kind):
        for place in PRIVATE_PLACES:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True, timeout=30)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.secret = self.folder / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.secret.chmod(0o600)
        self.before = self.things()
        self.jobs = KINDS[kind](self)
        self.launcher = self.jobs[0].process.pid
        self.await_steps()

    def start(self, *words):
        return Job(*words, env={"PYTHONPATH": str(BUILD / "python")}, stderr=subprocess.STDOUT)

    def await_steps(self):
        seen, said = set(), ""
        while len(seen) < N_RANKS:
            line = self.jobs[0].process.stdout.readline().decode()
            if not line:
                raise SystemExit(f"the job ended before its ranks had begun: {said}")
            said += line
            if "step 3 rank" in line:
                seen.add(line.split("rank ")[1].split()[0])

    def processes(self):
        """All but this one."""
        self.reap()
        return [pid for pid in process_ids() if pid != os.getpid()]

    def ranks(self):
        return [pid for pid in self.processes() if variable(pid, "HOROVOD_RANK") is not None]

    def agents(self):
        return [pid for pid in self.processes()
                if b"--agent\0" in command_line(pid) and not is_supervisor(pid)]

    def supervisors(self):
        return list(filter(is_supervisor, self.processes()))

    def reap(self):
        """Orphans come to the first process of their namespace; jobs are its own children."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            pass

    def things(self):
        """Whatever a job could leave behind."""
        found = [f"process {pid}: {command_line(pid)}" for pid in self.processes()]
        for place in PRIVATE_PLACES:
            found += [os.path.join(at, name) for at, folders, files in os.walk(place)
                      for name in folders + files]
        for table in ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"):
            found += pathlib.Path(table).read_text().splitlines()[1:]
        for table in ("unix", "tcp", "tcp6", "udp", "udp6"):
            lines = pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            # A closed connection stays in TIME_WAIT (06) for a minute: it is nobody's.
            found += [f"{table} {line}" for line in lines
                      if table[:3] != "tcp" or line.split()[3] != "06"]
        return found

    def left(self):
        return [thing for thing in self.things() if thing not in self.before]


PRIVATE_PLACES = ["/dev/shm", "/run", *([] if str(ROOT).startswith("/tmp/") else ["/tmp"])]

# --- Kinds of jobs: each starts one, its launcher first -----------------------------------------


def fixed(scene):
    return [scene.start("-np", N_RANKS, *RANK, scene.folder)]


def elastic(scene):
    return [scene.start("-np", N_RANKS, "-H", "localhost:1,127.0.0.2:1", "--min-np", N_RANKS,
                        "--elastic-restarts", 0, "--elastic-timeout", 3, *RANK, scene.folder)]


def dialled(scene):
    """Agents that dial, on what they say are two hosts."""
    port, common = 23100, ["--secret-file", scene.secret]
    agents = [scene.start("--agent", "--dial", f"127.0.0.1:{port}", "--agent-name", name, *common)
              for name in ("a", "b")]
    return [scene.start("--await-agents", port, "--await-address", "127.0.0.1", "-H", "a:1,b:1",
                        *common, *RANK, scene.folder), *agents]


KINDS = {job.__name__: job for job in (fixed, elastic, dialled)}

# --- Faults ------------------------------------------------------------------------------------


def interrupt_twice(scene):
    os.kill(scene.launcher, signal.SIGINT)
    time.sleep(0.3)
    os.kill(scene.launcher, signal.SIGINT)


def signal_all(pids, number):
    for pid in pids:
        os.kill(pid, number)


def stop_a_rank_and_end(scene):
    os.kill(scene.ranks()[0], signal.SIGSTOP)
    os.kill(scene.launcher, signal.SIGTERM)


def kill_supervisors_and_end(scene):
    signal_all(scene.supervisors(), signal.SIGKILL)
    os.kill(scene.launcher, signal.SIGTERM)


# What happens; it ends the job.
FAULTS = {
    "the launcher is killed": lambda scene: os.kill(scene.launcher, signal.SIGKILL),
    "the launcher is terminated": lambda scene: os.kill(scene.launcher, signal.SIGTERM),
    "the terminal is gone": lambda scene: os.kill(scene.launcher, signal.SIGHUP),
    "interrupted twice": interrupt_twice,
    "the agents are killed": lambda scene: signal_all(scene.agents(), signal.SIGKILL),
    "the agents are terminated": lambda scene: signal_all(scene.agents(), signal.SIGTERM),
    "launcher and agents are killed": lambda scene: signal_all(
        [scene.launcher, *scene.agents()], signal.SIGKILL),
    "the supervisors are killed, then the job ends": kill_supervisors_and_end,
    "all ranks are killed": lambda scene: signal_all(scene.ranks(), signal.SIGKILL),
    "a rank is stopped, then the job ends": stop_a_rank_and_end,
}
# What only a job of fixed size does not survive.
FAULTS_OF_FIXED = {"a rank is killed": lambda scene: os.kill(scene.ranks()[0], signal.SIGKILL)}


def be_inside(kind, fault):
    scene = Scene(kind)
    if not scene.left():
        raise SystemExit("a job that runs is not seen")
    {**FAULTS, **FAULTS_OF_FIXED}[fault](scene)
    eventually(lambda: not scene.left(), GONE_S)
    print(json.dumps(scene.left()), flush=True)
    os._exit(0)  # which ends whatever is left


class Leftovers(unittest.TestCase):
    def left(self, kind, fault):
        done = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", "--ipc", "--net", "--mount",
             sys.executable, __file__, str(BUILD), INSIDE, kind, fault], capture_output=True,
            text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S + GONE_S)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def see(self, kind, faults):
        for fault in faults:
            with self.subTest(kind=kind, fault=fault):
                self.assertEqual(self.left(kind, fault), [])

    def test_fixed(self):
        self.see("fixed", {**FAULTS, **FAULTS_OF_FIXED})

    def test_elastic(self):
        self.see("elastic", FAULTS)

    def test_dialled(self):
        self.see("dialled", {**FAULTS, **FAULTS_OF_FIXED})


if __name__ == "__main__":
    if os.getuid() != 0:
        raise SystemExit("test_leftovers.py makes namespaces: run it as root")
    if sys.argv[2:3] == [INSIDE]:
        be_inside(*sys.argv[3:5])
    main()
