#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Jobs of horovodrun on this machine: output, exit codes, endings, secrets, faults in the set-up.

Usage: test_local.py BUILD-DIRECTORY [unittest arguments]
"""
import fcntl
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

from launching import (BUILD, HOROVODRUN, HVD_INFO, SLACK, Case, Job, clean_environment,
                       command_line, eventually, main, process_ids, python, read, run,
                       write_packages)

SLEEP = ["sleep", "1000"]
STUBBORN = ["sh", "-c", "trap '' TERM INT; echo ready; while :; do sleep 1; done"]
RANK = "import os; rank = int(os.environ['HOROVOD_RANK']); "
JOIN = ("import os, signal, time; from horovod.common import basics as hvd; hvd.init(); "
        "print('ready', flush=True); ")

# Which processes and files show the text that is on stdin.
SEARCH = """
import os, sys

secret, found = sys.stdin.read().encode(), []

def look(path):
    try:
        with open(path, "rb") as file:
            if os.path.getsize(path) < 1 << 20 and secret in file.read(1 << 20):
                found.append(path)
    except OSError:
        pass

for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) != os.getpid():
        for name in "cmdline", "environ", "comm":
            look(f"/proc/{pid}/{name}")
for top in "/dev/shm", "/tmp", "/run":
    for place, folders, names in os.walk(top):
        if place != top:
            folders.clear()  # two levels are enough for what a launcher would drop
        for name in names:
            if os.path.isfile(os.path.join(place, name)):
                look(os.path.join(place, name))
print(found)
"""


def answer_as_http(server):
    connection, _ = server.accept()
    with connection:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def lines_of(text, rank, stream="stdout"):
    prefix = f"[{rank}]<{stream}>:"
    return [line[len(prefix):] for line in text.split("\n") if line.startswith(prefix)]


class Running(Case):
    def test_ranks_meet(self):
        out, _ = run("-np", 3, HVD_INFO, "--transports")
        for rank in range(3):
            self.assertIn(f"transports of rank {rank} of 3", "\n".join(lines_of(out, rank)))

    def test_two_names_of_this_machine_are_two_hosts(self):
        out, _ = run("-H", "localhost:1,127.0.0.1:1", HVD_INFO, "--transports")
        self.assertRegex("\n".join(lines_of(out, 0)), "from rank 0 to rank 1 +tcp")

    def test_exactly_np_ranks_start(self):
        out, _ = run("-np", 3, "-H", "localhost:2,127.0.0.1:4", "printenv", "HOROVOD_RANK")
        self.assertEqual(sorted(re.findall(r"^\[\d\]<stdout>:(\d)$", out, re.M)), ["0", "1", "2"])

    def test_environment_and_directory(self):
        names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME",
                 "CYCLE_TIME", "FUSION_THRESHOLD", "CONTROLLER", "CPU_OPERATIONS"]
        code = ("import os; print(os.getcwd(), os.environ['SOMETHING'], "
                f"*[os.environ['HOROVOD_' + name] for name in {names}], sep='|')")
        with tempfile.TemporaryDirectory() as directory:
            out, _ = run("-H", "localhost:2,127.0.0.1:1", "--cycle-time-ms", "2.5",
                         "--fusion-threshold-mb", 3, *python(code), cwd=directory,
                         env={"SOMETHING": "a b\"c"})
            tail = "|2.5|3145728|gloo|gloo"
            start = f"{os.path.realpath(directory)}|a b\"c|"
            self.assertEqual(lines_of(out, 0), [start + "0|3|0|2|0|2|localhost" + tail])
            self.assertEqual(lines_of(out, 1), [start + "1|3|1|2|0|1|localhost" + tail])
            self.assertEqual(lines_of(out, 2), [start + "2|3|0|1|1|2|127.0.0.1" + tail])

    def test_wishes_for_mpi_are_not_silently_dropped(self):
        for name, value, is_told in [("HOROVOD_CPU_OPERATIONS", "MPI", True),
                                     ("HOROVOD_CPU_OPERATIONS", "nonsense", True),
                                     ("HOROVOD_CONTROLLER", "mpi", True),
                                     ("HOROVOD_CPU_OPERATIONS", "GLOO", False),
                                     ("HOROVOD_CPU_OPERATIONS", "ccl", True),
                                     ("HOROVOD_CONTROLLER", "", False)]:
            with self.subTest(name=name, value=value):
                out, err = run("-np", 2, "printenv", name, env={name: value})
                self.assertEqual(lines_of(out, 1), ["gloo"])
                self.assertEqual(f"{name}={value} has no effect" in err, is_told, err)
                self.assertEqual(err.count("\n"), is_told)

    def test_ranks_have_no_input(self):
        job = Job("-np", 2, "cat", stdin=subprocess.PIPE)
        self.assertEqual(job.wait()[0], 0)

    def test_start_is_quick(self):
        def seconds(command):
            times = []
            for _ in range(5):
                begin = time.monotonic()
                subprocess.run([str(word) for word in command], check=True, env=clean_environment(),
                               stdout=subprocess.DEVNULL)
                times.append(time.monotonic() - begin)
            return statistics.median(times)

        direct = seconds([HVD_INFO, "--build"])
        launched = seconds([HOROVODRUN, "-np", 2, HVD_INFO, "--build"])
        self.assertLess(launched - direct, 0.15 * SLACK)


class Output(Case):
    def test_every_line_of_four_ranks(self):
        n = 100_000
        code = (RANK + "import sys; sys.stdout.writelines(f'{rank} line {i} ' + 'x' * (i % 90) + "
                f"chr(10) for i in range({n}))")
        out, err = run("-np", 4, *python(code))
        self.assertEqual(err, "")
        self.assertEqual(out.count("\n"), 4 * n)
        for rank in range(4):
            expected = [f"{rank} line {i} " + "x" * (i % 90) for i in range(n)]
            self.assertTrue(lines_of(out, rank) == expected, f"rank {rank} is torn or not whole")

    def test_slow_reader_loses_nothing(self):
        job = Job("-np", 2, *python("for _ in range(200000): print('y' * 99)"))
        time.sleep(3)
        code, out, _ = job.wait()
        self.assertEqual(code, 0)
        self.assertEqual(out.count(b"]<stdout>:" + b"y" * 99 + b"\n"), 400000)

    def test_gone_reader_ends_the_job(self):
        job = Job("-np", 2, "yes")
        job.process.stdout.read(100)
        job.process.stdout.close()
        job.process.stdout = None
        self.assertEqual(job.wait()[0], 128 + signal.SIGPIPE)
        self.finish(job, 5)

    def test_streams_bars_and_unended_lines(self):
        code = ("import sys; sys.stdout.write('10%\\r20%\\rdone'); sys.stdout.flush(); "
                "sys.stderr.write('caf\\u00e9\\n')")
        job = Job("-np", 1, *python(code), env={"PYTHONIOENCODING": "utf-8"})
        code, out, err = job.wait()
        self.assertEqual(code, 0)
        self.assertEqual(out, b"[0]<stdout>:10%\r[0]<stdout>:20%\r[0]<stdout>:done")
        self.assertEqual(err.decode(), "[0]<stderr>:caf\u00e9\n")

    def test_long_lines_stay_whole(self):
        size = 3_000_000
        out, _ = run("-np", 2, *python(RANK + f"print(str(rank) * {size})"))
        for rank in range(2):
            self.assertEqual([len(line) for line in lines_of(out, rank)], [size])

    def test_timestamps_and_colours(self):
        out, _ = run("-np", 1, "--prefix-output-with-timestamp", "echo", "x")
        self.assertRegex(out, r"^\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:x\n$")
        out, _ = run("-np", 1, "--color", "always", "echo", "x")
        self.assertRegex(out, "^\033\\[3\\dm\\[0\\]<stdout>:\033\\[0mx\n$")
        self.assertEqual(run("-np", 1, "echo", "x")[0], "[0]<stdout>:x\n")

    def test_files(self):
        with tempfile.TemporaryDirectory() as directory:
            place = pathlib.Path(directory) / "logs"
            run("-np", 11, "--output-filename", place, "sh", "-c",
                "echo out $HOROVOD_RANK; echo err $HOROVOD_RANK >&2")
            for rank in range(11):
                for stream in ("out", "err"):
                    text = (place / f"rank.{rank:02}" / f"std{stream}").read_text()
                    self.assertEqual(text, f"{stream} {rank}\n")


class Ending(Case):
    def test_exit_codes(self):
        for command, code in [("exit 0", 0), ("exit 1", 1), ("exit 77", 77), ("kill -9 $$", 137),
                              ("kill -11 $$", 139), ("nosuchcommand", 127)]:
            with self.subTest(command=command):
                run("-np", 2, "sh", "-c", f"[ $HOROVOD_RANK = 0 ] || {{ {command}; }}", expect=code)

    def test_first_failure_is_named_last(self):
        code = RANK + ("import time\nif rank == 2:\n    raise ValueError('broken on purpose')\n"
                       "time.sleep(1000)")
        _, err = run("--verbose", "-np", 3, *python(code), expect=1)
        self.assertIn("Process 2 exit with status code 1.", err)
        self.assertEqual(err.count("Terminating remaining workers after failure of Process 2."), 1)
        block = err[err.index("horovodrun: the job failed"):]
        self.assertLessEqual(block.count("\n"), 15)
        for part in ["rank 2", "localhost", "pid ", "ValueError: broken on purpose",
                     "after it: 2 other ranks were stopped"]:
            self.assertIn(part, block)

    def test_halted_rank_is_blamed(self):
        # As the library does; what a rank says is not read.
        note = "open(os.environ['HOROVOD_BLAME_FILE'], 'w').write('2')\n"
        lost = "rank 2 (host localhost, pid 7) has been silent"
        for said, noted, blamed in [("lost", note, 2), (lost, "", 0)]:
            with self.subTest(said=said):
                code = RANK + ("import signal, time\nif rank == 2:\n"
                               "    os.kill(os.getpid(), signal.SIGSTOP)\n"
                               f"time.sleep(1 + rank)\n{noted}raise RuntimeError('{said}')")
                _, err = run("-np", 3, *python(code), expect=1)
                block = err[err.index("horovodrun: the job failed"):]
                self.assertIn(f"because of rank {blamed}: ", block)
                self.assertIn(said, block)
                self.assertEqual("rank 0 gave up waiting for it" in block, blamed == 2)
                self.assertEqual("kill -CONT" in block, blamed == 2)

    def test_halted_rank_is_blamed_by_the_library(self):
        code = JOIN + ("from horovod.common.objects import allgather_object\n"
                       "if hvd.rank() == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
                       "allgather_object(1)")
        _, err = run("-np", 2, *python(code), expect=1,
                     env={"PYTHONPATH": str(BUILD / "python"),
                          "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "2"})
        block = err[err.index("horovodrun: the job failed"):]
        self.assertIn("because of rank 1: its process was halted", block)
        self.assertIn("rank 0 gave up waiting for it", block)

    def test_stubborn_ranks_are_killed(self):
        begin = time.monotonic()
        run("-np", 2, "sh", "-c", "trap '' TERM; [ $HOROVOD_RANK = 0 ] && exit 3; sleep 1000 & "
            "while :; do wait; done", expect=3)
        self.assertLess(time.monotonic() - begin, 6 * SLACK)

    def test_children_of_ranks_end_too(self):
        run("-np", 2, "sh", "-c", "sleep 1000 & setsid sleep 1000 & exit 0")

    def test_children_in_sessions_of_their_own_end_too(self):
        """With children of theirs, in further sessions: nobody finds them by group or parent."""
        run("-np", 2, "sh", "-c", "setsid sh -c 'setsid sh -c \"setsid sleep 1000 & sleep 1000\" & "
            "sleep 1000' & sleep 0.3; exit 0")

    def test_they_end_with_a_killed_agent(self):
        job = Job("-np", 2, "sh", "-c", "setsid sh -c 'setsid sleep 1000 & sleep 1000' & "
                  "sleep 0.3; echo ready; exec sleep 1000")
        for _ in range(2):
            self.assertIn(b"ready", job.process.stdout.readline())
        os.kill(job.agent(), signal.SIGKILL)
        self.assertEqual(job.wait()[0], 69)
        self.finish(job, 5)

    def test_killed_supervisor(self):
        """Another takes its place, so that a killed agent leaves nothing even then."""
        job = Job("-np", 1, "sh", "-c", "echo ready; exec sleep 1000")
        self.assertIn(b"ready", job.process.stdout.readline())

        def supervisors():
            return [pid for pid in job.survivors() if b"supervisor" in read(pid, "comm")]

        self.assertTrue(eventually(supervisors, 5))  # it takes its name when it runs
        first, = supervisors()
        directory = job.directory()
        os.kill(first, signal.SIGKILL)
        self.assertTrue(eventually(lambda: supervisors() not in ([], [first]), 5))
        os.kill(job.agent(), signal.SIGKILL)
        job.wait()
        self.finish(job, 5)
        self.assertFalse(directory.exists())

    def test_signals(self):
        for signo in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1):
            with self.subTest(signo=signo):
                job = Job("-np", 2, "sh", "-c", "echo ready; exec sleep 1000")
                self.assertIn(b"ready", job.process.stdout.readline())
                job.process.send_signal(signo)
                self.assertEqual(job.wait()[0], 128 + signo)
                self.finish(job, 5)

    def test_second_signal_does_not_wait(self):
        job = Job("-np", 2, *STUBBORN)
        for _ in range(2):
            self.assertIn(b"ready", job.process.stdout.readline())
        begin = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        job.process.send_signal(signal.SIGINT)
        self.assertEqual(job.wait()[0], 130)
        self.assertLess(time.monotonic() - begin, 4.5)
        self.finish(job, 5)

    def test_killed_launcher_takes_everything_along(self):
        job = Job("-np", 2, "sh", "-c", "trap '' TERM; echo ready; sleep 1000 & wait; sleep 1000")
        for _ in range(2):
            self.assertIn(b"ready", job.process.stdout.readline())
        directory = job.directory()
        job.process.kill()
        self.finish(job, 2 * SLACK)
        self.assertTrue(eventually(lambda: not directory.exists(), 5))

    def test_killed_agent_is_named(self):
        job = Job("-np", 2, "sh", "-c", "echo ready; sleep 1000 & wait")
        for _ in range(2):
            self.assertIn(b"ready", job.process.stdout.readline())
        directory = job.directory()
        os.kill(job.agent(), signal.SIGKILL)
        code, _, err = job.wait()
        self.assertEqual(code, 69)
        self.assertIn("lost the agent on host localhost", err.decode())
        self.finish(job, 2 * SLACK)
        self.assertTrue(eventually(lambda: not directory.exists(), 5))


class Sockets(Case):
    """However a rank ends, the socket where it showed itself ends with it."""

    def start(self, *command, env=None, **options):
        job = Job("-np", 2, *command, env={"PYTHONPATH": str(BUILD / "python"), **(env or {})},
                  **options)
        self.addCleanup(job.kill)
        for _ in range(2):
            self.assertIn(b"ready", job.process.stdout.readline())
        return job

    def test_signals_and_kills(self):
        asleep = python(JOIN + "time.sleep(1000)")
        in_a_shell = ["sh", "-c", shlex.join(asleep) + "; true"]
        stopped = python(JOIN + "os.kill(os.getpid(), signal.SIGSTOP)")
        for command in (asleep, in_a_shell, stopped):
            for signo in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
                with self.subTest(command=command, signo=signo):
                    job = self.start(*command)
                    self.assertEqual(len(job.sockets()), 2)
                    job.process.send_signal(signo)
                    self.finish(job, 2 * SLACK)

    def test_killed_agent(self):
        job = self.start(*python(JOIN + "time.sleep(1000)"))
        os.kill(job.agent(), signal.SIGKILL)
        self.finish(job, 2 * SLACK)

    def test_failed_rank(self):
        for end in ("raise ValueError", "os.kill(os.getpid(), signal.SIGKILL)"):
            with self.subTest(end=end):
                code = JOIN + f"time.sleep(1000) if hvd.rank() else None\n{end}"
                self.finish(self.start(*python(code)), 2 * SLACK)

    def test_retired_directory(self):
        """HOROVOD_MONITOR_DIR may still be set: nothing is said of it, and nothing put there."""
        with tempfile.TemporaryDirectory(prefix="hvd-", dir="/tmp") as directory:
            pathlib.Path(directory, "mine").mkdir()
            job = self.start(*python(JOIN + "time.sleep(1000)"), cwd=directory,
                             env={"HOROVOD_MONITOR_DIR": "mine"})
            self.assertEqual(len(job.sockets()), 2)
            self.assertEqual([path.name for path in pathlib.Path(directory).rglob("*")], ["mine"])
            job.process.send_signal(signal.SIGTERM)
            self.assertNotIn(b"MONITOR_DIR", job.wait()[2])
            self.finish(job, 2 * SLACK)


class Secret(Case):
    def test_nobody_else_sees_it(self):
        job = Job("-np", 2, "sh", "-c", "echo ready; exec sleep 1000")
        self.addCleanup(job.kill)
        for _ in range(2):
            self.assertIn(b"ready", job.process.stdout.readline())
        directory = job.directory()
        secret = (directory / "secret").read_text()
        self.assertEqual(len(secret), 64)
        self.assertEqual(directory.stat().st_mode & 0o777, 0o700)
        self.assertEqual((directory / "secret").stat().st_mode & 0o777, 0o600)
        for pid in process_ids():
            self.assertNotIn(secret.encode(), command_line(pid))
            self.assertNotIn(secret.encode(), read(pid, "environ"))
        # The same search, and one of all files, by somebody else.
        somebody = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
        if somebody:
            done = subprocess.run(["/usr/bin/python3", "-c", SEARCH], input=secret, text=True,
                                  timeout=60, stdout=subprocess.PIPE, check=True, cwd="/",
                                  **somebody)
            self.assertEqual(done.stdout.strip(), "[]")
        job.process.send_signal(signal.SIGTERM)
        self.assertEqual(job.wait()[0], 143)
        self.assertFalse(directory.exists())

    def test_left_by_a_killed_agent(self):
        places = [pathlib.Path(tempfile.mkdtemp(prefix="hvd-agent-", dir="/dev/shm"))
                  for _ in range(3)]
        for place in places:
            self.addCleanup(shutil.rmtree, place, ignore_errors=True)
            (place / "secret").write_text("0" * 64)
        abandoned, in_use, young = places
        for place in (abandoned, in_use):
            os.utime(place, (0, 0))
        lock = os.open(in_use, os.O_RDONLY)
        self.addCleanup(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        run("-np", 1, "true")
        self.assertEqual([place.exists() for place in (abandoned, in_use, young)],
                         [False, True, True])


class Functions(Case):
    def test_payload_and_results(self):
        with tempfile.TemporaryDirectory() as directory:
            place = pathlib.Path(directory)
            data = os.urandom(3_000_000)
            (place / "payload").write_bytes(data)
            code = (RANK + "data = open(os.environ['HOROVOD_RUN_PAYLOAD'], 'rb').read(); "
                    "open(os.environ['HOROVOD_RUN_RESULT'], 'wb').write(data[rank:])")
            run("-np", 2, "--payload", place / "payload", "--results", place, *python(code))
            for rank in range(2):
                self.assertEqual((place / f"rank.{rank}").read_bytes(), data[rank:])


class Words(Case):
    def test_wrong_command_lines(self):
        for words, part in [(["--hostz", "a", "x"], "did you mean --hosts?"),
                            (["-np", "2"], "no command given"),
                            (["x"], "-np"),
                            (["-np", "3", "-H", "localhost:2", "x"],
                             "Requested more processes (3) than there are available slots (2)"),
                            (["-H", "a:x", "y"], "Invalid host input"),
                            (["-np", "2", "--min-np", "2", "--elastic-restarts", "0", "x"],
                             "elastic"),
                            (["--gloo", "--mpi", "x"], "contradicts")]:
            with self.subTest(words=words):
                _, err = run(*words, expect=2)
                self.assertIn(part, err)
                self.assertEqual(err.count("\n"), 1)

    def test_print_config(self):
        with tempfile.TemporaryDirectory() as directory:
            file = pathlib.Path(directory) / "config.yaml"
            file.write_text("params: {cache_capacity: 7}\n")
            out, _ = run("--cycle-time-ms", 3, "--config-file", file, "--print-config",
                         env={"HOROVOD_LOG_LEVEL": "debug"})
        rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:]}
        self.assertEqual(rows["--cycle-time-ms"], ["3", "flag"])
        self.assertEqual(rows["--cache-capacity"], ["7", "file"])
        self.assertEqual(rows["--log-level"], ["debug", "environment", "HOROVOD_LOG_LEVEL"])
        self.assertEqual(rows["--ssh-attempts"], ["5", "default"])

    def test_check_build(self):
        out, _ = run("--check-build")
        self.assertRegex(out, r"^Horovod v\d+\.\d+\.\d+:\n\nAvailable Frameworks:\n"
                              r"    \[[ X]\] TensorFlow\n    \[[ X]\] PyTorch\n"
                              r"    \[[ X]\] MXNet\n\n"
                              r"Available Controllers:\n    \[X\] MPI\n    \[X\] Gloo\n\n"
                              r"Available Tensor Operations:\n    \[ \] NCCL\n    \[ \] DDL\n"
                              r"    \[ \] CCL\n    \[X\] MPI\n    \[ \] Gloo\n"
                              r"    \[X\] Horovod's own, over TCP, shared memory and libfabric\n$")

    def test_version_and_help(self):
        self.assertRegex(run("--version")[0], r"^\d+\.\d+\.\d+\n$")
        self.assertIn("--output-filename", run("--help")[0])

    def test_completion_is_shell(self):
        script = run("--completion", "bash")[0]
        ask = "COMP_WORDS=(horovodrun --ssh-); COMP_CWORD=1; _horovodrun; echo ${COMPREPLY[@]}"
        done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True,
                              check=True)
        self.assertEqual(set(done.stdout.split()), {"--ssh-port", "--ssh-identity-file",
                         "--ssh-command", "--ssh-accept-new", "--ssh-attempts"})


class Doctor(Case):
    """What a bare interpreter imports is only what a test has written."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)
        self.packages = self.place / "packages"
        self.packages.mkdir()
        path = self.place / "python"
        path.write_text("#!/bin/sh\n"
                        f"PYTHONPATH={self.packages} exec {sys.executable} -S \"$@\"\n")
        path.chmod(0o755)

    def examine(self, *command, expect=0, **packages):
        if not any(self.packages.iterdir()):
            write_packages(self.packages, **packages)
        return run("--doctor", *command, expect=expect,
                   env={"PATH": f"{self.place}:{os.environ['PATH']}"})

    def test_nothing_wrong_here(self):
        out, err = self.examine(torch="__version__ = '7.8'")
        self.assertIn("no faults found", out)
        for part in ["host localhost", "shared memory", "open files", "clock", "ok     Python: 3.",
                     "ok     torch: 7.8\n", "ok     tensorflow: not installed"]:
            self.assertIn(part, out)
        self.assertRegex(out, r"ok     horovod: \d+\.\d+\.\d+\n")
        self.assertRegex(out, r"trial job: 2 ranks on localhost\n(.*\n)*.*2 ranks met")
        self.assertEqual(err, "")

    def test_python_has_no_horovod(self):
        out, _ = self.examine(horovod=None, expect=1)
        self.assertIn("FAULT  horovod: not installed\n         fix: install it", out)
        self.assertTrue(out.endswith("1 fault found\n"), out)

    def test_a_command_without_python_needs_no_horovod(self):
        self.assertIn("no faults found", self.examine("/bin/true", horovod=None)[0])

    def test_the_python_of_the_command(self):
        """And not the one of PATH, which has everything."""
        bare = self.place / "python3.99"
        bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S -E \"$@\"\n")
        bare.chmod(0o755)
        out, _ = self.examine(bare, expect=1)
        self.assertIn("FAULT  horovod: not installed", out)
        out, _ = run("--doctor", "/no/such/python", expect=1)
        self.assertIn("FAULT  Python: /no/such/python cannot be started there", out)

    def test_the_script_of_the_command(self):
        script = self.place / "train.py"
        for words in [[], ["-u"], ["-W", "ignore"], ["-uX", "dev"]]:
            out, _ = self.examine("python", *words, script, expect=1)
            self.assertIn(f"FAULT  script: no file {script} in {os.getcwd()}\n         fix: ", out)
            self.assertTrue(out.endswith("1 fault found\n"), out)
        script.write_text("if True\n")
        out, _ = self.examine("python", script, expect=1)
        self.assertIn(f"FAULT  script: {script} in {os.getcwd()} is no Python script: ", out)
        script.write_text("import sys\n")
        for words in [["python", script], ["python", "-um", "json.tool"], ["python", "-c", "1/0"]]:
            out, _ = self.examine(*words)
            self.assertIn("no faults found", out)
            self.assertEqual("ok     script: " in out, "-c" not in words)
        out, _ = self.examine("python", "-m", "nobody.trains", expect=1)
        self.assertIn("FAULT  script: no module nobody.trains for python -m in ", out)

    def test_broken_packages(self):
        out, _ = self.examine(torch="raise ImportError('libcudart.so: cannot open\\nit')",
                              tensorflow="import os\nos.abort()", expect=1)
        self.assertIn("FAULT  torch: cannot be imported: ImportError: libcudart.so: cannot open it",
                      out)
        self.assertIn("FAULT  tensorflow: its import crashed", out)
        self.assertTrue(out.endswith("2 faults found\n"), out)

    def test_another_version_of_horovod(self):
        out, _ = self.examine(horovod="__version__ = '0.28.1'", expect=1)
        self.assertIn("FAULT  horovod: 0.28.1, but horovodrun is of version", out)


class Banner(Case):
    def test_one_line_at_the_start_and_one_at_the_end(self):
        _, err = run("-np", 2, "--log-level", "info", "--summary", HVD_INFO, "--transports")
        banner, = [line for line in err.splitlines() if "<start> info:" in line]
        self.assertRegex(banner, r"^\[0\].*: 2 ranks on 1 host, shm, version \d+\.\d+\.\d+$")
        summary, = [line for line in err.splitlines() if "<summary>" in line]
        self.assertRegex(summary, r"^\[0\].*: [\d.]+ s on 2 ranks: \d+ operations? of rank 0 ")

    def test_encrypted_between_hosts(self):
        _, err = run("-np", 2, "--log-level", "info", "sh", "-c",
                     f"HOROVOD_HOSTNAME=h$HOROVOD_RANK HOROVOD_LOCAL_RANK=0 HOROVOD_LOCAL_SIZE=1 "
                     f"exec {HVD_INFO} --transports")
        self.assertIn(": 2 ranks on 2 hosts, TLS, version", err)

    def test_silent_unless_asked(self):
        self.assertEqual(run("-np", 2, HVD_INFO, "--transports")[1], "")


class Hints(Case):
    def test_known_last_lines(self):
        for line, hint in [("ModuleNotFoundError: No module named 'horovod'", "no horovod"),
                           ("ModuleNotFoundError: No module named 'torch'", "--doctor"),
                           ("ValueError: ... environment variable RANK expected, ...",
                            'init_process_group("hvd")'),
                           ("zipfile.BadZipFile: Bad CRC-32", "save on rank 0 only"),
                           ("'Adam' object has no attribute 'param_groups'", "horovod.keras"),
                           ("torch.OutOfMemoryError: CUDA out of memory. Tried", "smaller batch"),
                           ("OSError: [Errno 98] Address already in use", "another process"),
                           ("FileNotFoundError: [Errno 2] No such file", "hvd.barrier()"),
                           ("RuntimeError: nobody knows this one", "see what it wrote")]:
            with self.subTest(line):
                _, err = run("-np", 1, "sh", "-c", f'echo "$0" >&2; echo more >&2; exit 1', line,
                             expect=1)
                advice, = [line for line in err.splitlines() if "what to try:" in line]
                self.assertIn(hint, advice)

    def test_flags_of_other_launchers(self):
        for flag, hint in [("--nproc-per-node", "use -np"), ("--nproc_per_node=2", "use -np"),
                           ("--nnodes=2", "use -H"), ("--master_addr=a", "not needed")]:
            _, err = run(flag, "2", "true", expect=2)
            self.assertIn(hint, err)


class StandIns(Case):
    """Programs that record how they are called."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)

    def write(self, name, text):
        path = self.place / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def environment(self):
        return {"PATH": f"{self.place}:/usr/bin:/bin"}

    def test_no_mpi(self):
        _, err = run("-np", 2, "--mpi", "x", expect=127, env={"PATH": str(self.place)})
        self.assertIn("horovod does not find an installed MPI.", err)

    def test_mpi(self):
        for version, first in [("mpirun (Open MPI) 4.1", "--allow-run-as-root --tag-output -np 2"),
                               ("Intel(R) MPI Library for Linux* OS", "-l -np 2 -ppn 2 -hosts")]:
            with self.subTest(version=version):
                self.write("mpirun", "#!/bin/sh\n"
                           f"[ \"$1\" = --version ] && {{ echo '{version}'; exit; }}\n"
                           "echo \"$@ cycle=$HOROVOD_CYCLE_TIME\"; exit 5\n")
                out, _ = run("-np", 2, "--mpi", "--cycle-time-ms", 2, "train", "a b", expect=5,
                             env=self.environment())
                self.assertTrue(out.startswith(first), out)
                self.assertTrue(out.endswith("train a b cycle=2\n"), out)

    def test_jsrun(self):
        self.write("jsrun", "#!/bin/sh\necho \"$@\"; cat \"$2\"; exit 6\n")
        out, _ = run("--jsrun", "--mpi-args", "--bind none", "train", expect=6,
                     env={**self.environment(), "LSB_MCPU_HOSTS": "batch 1 n1 2 n2 1"})
        self.assertRegex(out, "^--erf_input /tmp/horovod-erf-\\w+ --bind none train\n")
        self.assertIn("overlapping_rs: allow\ncpu_index_using: logical\n", out)
        self.assertEqual(re.findall(r"^rank: (\d): { hostname: (\w+);", out, re.M),
                         [("0", "n1"), ("1", "n1"), ("2", "n2")])
        self.assertEqual(list(pathlib.Path("/tmp").glob("horovod-erf-*")), [])

    # --- Faults in the set-up that need no other host ---

    def test_no_ssh(self):
        _, err = run("-H", "elsewhere.invalid:1", "x", expect=69, env={"PATH": str(self.place)})
        self.assertIn("ssh is not installed on this machine", err)
        self.assertIn("openssh-client", err)

    def test_unknown_host(self):
        _, err = run("-H", "elsewhere.invalid:1", "--ssh-attempts", 1, "x", expect=69)
        self.assertIn("elsewhere.invalid", err)
        self.assertIn("the name cannot be resolved here", err)
        self.assertRegex(err, r"\(.*[^ ]\); check its spelling")  # what ssh said, without its CR

    def test_no_secret_for_agents_that_wait(self):
        _, err = run("-H", "elsewhere.invalid:1", "--agent-port", 9, "x", expect=69)
        self.assertIn("no secret file is named (--secret-file)", err)

    def test_not_installed_there(self):
        said = "horovodrun-agent: not installed"
        fake = self.write("fake", f"#!/bin/sh\necho '{said}' >&2; exit 127\n")
        _, err = run("-H", "elsewhere.invalid:1", "--ssh-command", fake, "x", expect=69)
        self.assertIn("horovodrun is not installed there", err)

    def test_other_version(self):
        def text(words):
            data = words.encode() + b"\0"
            return struct.pack("<I", len(data)) + data

        body = b"\x01" + text("0.0.1")
        (self.place / "hello").write_bytes(struct.pack("<I", len(body)) + body)
        fake = self.write("fake", f"#!/bin/sh\ncat {self.place}/hello; sleep 20\n")
        _, err = run("-H", "elsewhere.invalid:1", "--ssh-command", fake, "x", expect=69)
        self.assertIn("version mismatch: host elsewhere.invalid has version 0.0.1", err)
        self.assertIn("install the same version", err)

    def test_noisy_shell(self):
        fake = self.write("fake", "#!/bin/sh\necho welcome to this fine machine; sleep 20\n")
        _, err = run("-H", "elsewhere.invalid:1", "--ssh-command", fake, "x", expect=69)
        self.assertIn("the answer from host elsewhere.invalid does not come from the agent", err)

    def test_slow_host(self):
        fake = self.write("fake", "#!/bin/sh\nexec sleep 100\n")
        begin = time.monotonic()
        _, err = run("-H", "localhost:1,elsewhere.invalid:1", "--ssh-command", fake,
                     "--start-timeout", 2, "x", expect=75)
        self.assertLess(time.monotonic() - begin, 2 * SLACK + 2)
        self.assertIn("elsewhere.invalid did not answer within 2 s", err)
        self.assertIn("--start-timeout", err)

    def test_many_hosts_start_in_the_time_of_one(self):
        fake = self.write("fake", f"#!/bin/sh\nsleep 1\nexec {HOROVODRUN} --agent\n")
        n = 64
        hosts = ",".join(f"host{i}.invalid:1" for i in range(n))
        begin = time.monotonic()
        out, _ = run("-H", hosts, "--ssh-command", fake, "printenv", "HOROVOD_HOSTNAME")
        self.assertLess(time.monotonic() - begin, n / 2)
        self.assertEqual({line.partition(":")[2] for line in out.splitlines()},
                         {f"host{i}.invalid" for i in range(n)})

    def test_no_such_command(self):
        _, err = run("-np", 2, "nosuchprogram", expect=127)
        self.assertIn("cannot start nosuchprogram: No such file or directory", err)
        self.assertIn("PATH", err)
        script = self.place / "script"
        script.write_text("echo\n")
        _, err = run("-np", 1, script, expect=126)
        self.assertIn("chmod +x", err)

    def test_no_such_interface(self):
        _, err = run("-np", 2, "--network-interfaces", "nosuch0", "x", expect=2)
        self.assertIn("nosuch0", err)
        self.assertIn("ip address", err)

    def test_few_descriptors(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))

        job = Job("-np", 2, "true", preexec_fn=limit)
        code, _, err = job.wait()
        self.assertNotEqual(code, 0)
        self.assertIn("Too many open files", err.decode())
        self.assertIn("ulimit -n", err.decode())

    def test_port_in_use(self):
        """Something else is where agents should wait: named there, and by who knocks there."""
        secret = self.write("secret", os.urandom(32).hex())
        secret.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            _, err = run("--serve-agents", "--agent-port", port, "--secret-file", secret, expect=2)
            for part in [f"cannot listen on port {port}", "Address already in use", "ss -ltnp",
                         "choose another port"]:
                self.assertIn(part, err)
            answering = threading.Thread(target=answer_as_http, args=(other,), daemon=True)
            answering.start()
            fake = self.write("fake", f"#!/bin/sh\nexec {HOROVODRUN} --dial-agent 127.0.0.1 "
                              f"--agent-port {port} --secret-file {secret}\n")
            _, err = run("-H", "elsewhere.invalid:1", "--ssh-command", fake, "x", expect=69)
            self.assertIn("elsewhere.invalid", err)
            self.assertIn("the address and port belong to this job", err)
            answering.join(10)

    def test_output_that_cannot_be_written(self):
        _, err = run("-np", 1, "--output-filename", "/proc/nowhere", "true", expect=74)
        self.assertIn("/proc/nowhere", err)


if __name__ == "__main__":
    assert shutil.which("bash")
    main()
