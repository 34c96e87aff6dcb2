# SPDX-License-Identifier: Apache-2.0
"""What the tests of horovodrun share: running it, looking at processes, stand-in programs.

A test may not leave anything behind: every job runs with a mark in its environment, and
`survivors` finds the processes that still carry it, and `sockets` where its ranks show themselves
(docs/observability.md).
"""
import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()
HOROVODRUN = BUILD / "horovodrun"
HVD_INFO = BUILD / "hvd-info"
TIMEOUT_S = 60
SLACK = 3  # the machine may be busy: bounds are this many times what the documentation says
MARK = "HVD_TEST_MARK"


def clean_environment():
    return {name: value for name, value in os.environ.items()
            if not name.startswith(("HOROVOD", "NO_COLOR", "SLURM", "LSB_", "PBS_", "SKYPILOT_"))}


class Job:
    """A running horovodrun; `mark` is in the environment of all its processes."""

    def __init__(self, *words, env=None, before=(), **options):
        self.mark = uuid.uuid4().hex
        self.ids = set()  # the values of HOROVOD_JOB_ID that its ranks have been seen with
        environment = {**clean_environment(), MARK: self.mark, **(env or {})}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        command = [*map(str, before), str(HOROVODRUN), *map(str, words)]
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **options)

    def wait(self, timeout=TIMEOUT_S):
        """(exit code, stdout, stderr) as bytes."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {timeout} s:\n{out}\n{err}") from None
        return self.process.returncode, out, err

    def survivors(self):
        return [pid for pid in process_ids() if variable(pid, MARK) == self.mark]

    def sockets(self):
        """Their abstract names, whoever holds them now."""
        self.ids |= {variable(pid, "HOROVOD_JOB_ID") for pid in self.survivors()} - {None}
        prefixes = tuple(f"@hvd-{os.geteuid()}/{job_id}/rank-" for job_id in self.ids)
        lines = pathlib.Path("/proc/net/unix").read_text().splitlines()
        return [name for line in lines if (name := line.split()[-1]).startswith(prefixes)]

    def left_behind(self, timeout_s):
        """Command lines and sockets that are still there after this time; they go now."""
        eventually(lambda: not self.survivors() and not self.sockets(), timeout_s)
        left = [*map(command_line, self.survivors()), *self.sockets()]
        self.kill()
        return left

    def kill(self):
        for pid in self.survivors():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def directory(self):
        """Where the secret lies on this host."""
        files = {variable(pid, "HOROVOD_SECRET_FILE") for pid in self.survivors()} - {None}
        return pathlib.Path(files.pop()).parent

    def agent(self):
        """Its process; there is one."""
        agent, = [pid for pid in self.survivors()
                  if b"--agent" in command_line(pid) and b"supervisor" not in read(pid, "comm")]
        return agent


def process_ids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read(pid, name):
    try:
        return pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def command_line(pid):
    return read(pid, "cmdline")


def variable(pid, name):
    for entry in read(pid, "environ").split(b"\0"):
        key, _, value = entry.partition(b"=")
        if key.decode(errors="replace") == name:
            return value.decode(errors="replace")
    return None


def eventually(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def run(*words, expect=0, **options):
    """(stdout, stderr) as text of a job that ends with the expected code."""
    job = Job(*words, **options)
    code, out, err = job.wait()
    out, err = out.decode(), err.decode()
    if code != expect:
        raise AssertionError(f"{words} ended with {code}, not {expect}:\n{out}\n{err}")
    left = job.left_behind(5)
    if left:
        raise AssertionError(f"{words} left behind {left}")
    return out, err


def python(code):
    """Words that run some Python as a rank."""
    return [sys.executable, "-c", code]


def write_packages(place, **packages):
    """Python packages of these names and texts; a horovod with its bindings unless one is named."""
    version = subprocess.run([HOROVODRUN, "--version"], capture_output=True, text=True, check=True)
    packages = {"horovod": f"__version__ = {version.stdout.strip()!r}", **packages}
    for name, text in packages.items():
        if text is not None:
            (place / name).mkdir()
            (place / name / "__init__.py").write_text(text)
    for binding in ("torch", "tensorflow"):
        if packages["horovod"] is not None:
            (place / "horovod" / f"{binding}.py").write_text("")


class Case(unittest.TestCase):
    def finish(self, job, timeout_s):
        """Everything of the job is gone within the time."""
        self.assertEqual(job.left_behind(timeout_s), [])
        job.process.communicate()


def main():
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
