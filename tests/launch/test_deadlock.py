#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is said while ranks wait: soon and once if none can go on, nothing if one is only busy, and
where they were when somebody stops them.

Usage: test_deadlock.py BUILD-DIRECTORY [unittest arguments]
"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from launching import BUILD, SLACK, Case, main

HEAD = """\
import sys
import time
from horovod.common import basics as hvd
from horovod.common.objects import allgather_object, broadcast_object

hvd.init()
rank = hvd.rank()
print("ready", flush=True)
"""
OTHER_ORDER = HEAD + """\
if rank == 1:
    allgather_object(1, name="b")
    allgather_object(1, name="a")
else:
    allgather_object(1, name="a")
    allgather_object(1, name="b")
"""
OTHER_OPERATION = HEAD + """\
allgather_object(1, name="together")
if rank == 1:
    broadcast_object(1, name="both")
else:
    allgather_object(1, name="both")
"""
EPOCHS = HEAD + """\
for epoch in range(2):
    for step in range(40):
        allgather_object(step, name="step")
        time.sleep(0.01)
    if rank == 0:
        time.sleep(float(sys.argv[1]))  # as to save a checkpoint
allgather_object(0, name="step")
print("done", flush=True)
"""
STOPPED = HEAD + """\


def load():
    time.sleep(100)


def spin():
    while True:
        pass


if rank == 0:
    allgather_object(1, name="a")
elif rank == 1:
    load()
else:
    spin()
"""
ABSENT = HEAD + """\
allgather_object(1, name="together")
if rank == int(sys.argv[1]):
    time.sleep(100)
allgather_object(1, name="loss")
"""


def start(directory, size, script, *words, options=()):
    pathlib.Path(directory, "train.py").write_text(script)
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("HOROVOD")}
    environment["PYTHONPATH"] = str(BUILD / "python")
    return subprocess.Popen([BUILD / "horovodrun", "-np", str(size), *options, sys.executable,
                             "train.py", *words], cwd=directory, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


class Deadlock(Case):
    def check_other_order(self, size):
        with tempfile.TemporaryDirectory() as directory:
            job = start(directory, size, OTHER_ORDER)
            for _ in range(size):
                job.stdout.readline()
            begin, said = time.monotonic(), ""
            while "does not end by itself" not in said:
                said += job.stderr.readline()
                if time.monotonic() - begin > 20 * SLACK:
                    break
            took = time.monotonic() - begin
            time.sleep(4)  # it is said once
            job.terminate()
            said += job.communicate(timeout=30)[1]
        self.assertLess(took, 5 * SLACK, said)
        self.assertEqual(said.count("Deadlock:"), 1, said)
        lines = said.split("\n")
        first = next(i for i, line in enumerate(lines) if "Deadlock:" in line)
        self.assertRegex(lines[first], r"^\[0\]<stderr>:.*Deadlock: every rank waits")
        for rank in range(size):  # the verdict, then a line for each rank
            line = 9 + 1 if rank == 1 else 9 + 4
            name = "b" if rank == 1 else "a"
            told = [i for i, text in enumerate(lines) if f"rank {rank}: it waits in" in text]
            self.assertEqual(len(told), 1, said)
            self.assertTrue(first < told[0] <= first + size, said)
            self.assertRegex(lines[told[0]], rf"rank {rank}: it waits in 'allgather.{name}[^']*' "
                                             rf"\([^)]*train.py:{line}\) for \d")
        self.assertIn("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", said)
        self.assertLess(said.count("\n"), 15 + size, said)

    def test_two_ranks(self):
        self.check_other_order(2)

    def test_four_ranks(self):
        self.check_other_order(4)

    def test_the_report_with_stacks_does_not_repeat_the_verdict(self):
        with tempfile.TemporaryDirectory() as directory:
            job = start(directory, 2, OTHER_ORDER,
                        options=["--stall-check-warning-time-seconds", "5"])
            said = ""
            while said.count('File "') < 2 or "Deadlock:" not in said:
                line = job.stderr.readline()
                self.assertTrue(line, said)
                said += line
            time.sleep(4.5)  # as long as it takes to ask once more whether all wait
            job.terminate()
            said += job.communicate(timeout=30)[1]
        self.assertEqual(said.count("Deadlock:"), 1, said)
        # Stacks end at the user's line.
        self.assertRegex(said, r'File "[^"]*train.py", line 1[03], in <module>')
        self.assertNotIn(f'File "{BUILD}', said)

    def test_two_operations_of_one_name(self):
        with tempfile.TemporaryDirectory() as directory:
            job = start(directory, 2, OTHER_OPERATION)
            said = ""
            while "does not end by itself" not in said:
                line = job.stderr.readline()
                self.assertTrue(line, said)
                said += line
            job.terminate()
            job.communicate(timeout=30)
        self.assertEqual(said.count("Deadlock:"), 1, said)
        self.assertRegex(said, r"\[\w+.both.sz\] and \[\w+.both.sz\] differ only in the operation")

    def run_epochs(self, pause):
        """What is said of the pause. That a rank got no core for seconds is the machine's doing."""
        with tempfile.TemporaryDirectory() as directory:
            job = start(directory, 2, EPOCHS, str(pause))
            out, err = job.communicate(timeout=120)
        self.assertEqual(job.returncode, 0, err)
        self.assertEqual(out.count("done"), 2)
        return [line for line in err.splitlines() if "<heartbeat>" not in line]

    def test_pauses_at_the_ends_of_epochs_are_nobodys_business(self):
        self.assertEqual(self.run_epochs(5), [])

    def test_a_pause_beyond_all_rhythm_is_a_line(self):
        lines = self.run_epochs(14)
        self.assertEqual(len(lines), 1, lines)
        self.assertTrue(re.search(r"Rank 0 has not submitted '[^']*' for 1\d s", lines[0]), lines)

    def check_absent(self, size, absent):
        with tempfile.TemporaryDirectory() as directory:
            job = start(directory, size, ABSENT, str(absent),
                        options=["--stall-check-warning-time-seconds", "2",
                                 "--stall-check-shutdown-time-seconds", "6"])
            said = job.communicate(timeout=120)[1]
        others = [str(rank) for rank in range(size) if rank != absent]
        self.assertEqual(job.returncode, 1, said)
        block = said[said.index("horovodrun: the job failed"):]
        deed = r"did not submit 'allgather\.loss[^']*' within 6 seconds"
        self.assertRegex(block.split("\n")[0],
                         rf"because of rank {absent}: it {deed}.* waited; stopped by horovodrun$")
        self.assertLessEqual(block.count("\n"), 25)
        for rank in others:
            self.assertRegex(said, rf"\[[^]]*\]<stderr>:.*Rank {absent} {deed}")
            self.assertIn(f"rank {rank}: exit code 1", block)

    def test_past_the_limit_the_missing_rank_is_blamed(self):
        self.check_absent(2, 0)
        self.check_absent(4, 2)

    def check_stopped(self, signo):
        with tempfile.TemporaryDirectory() as directory:
            job = start(directory, 3, STOPPED)
            for _ in range(3):
                job.stdout.readline()
            time.sleep(1)
            begin = time.monotonic()
            job.send_signal(signo)
            said = job.communicate(timeout=30)[1]
            took = time.monotonic() - begin
        self.assertEqual(job.returncode, 128 + signo, said)
        self.assertLess(took, 4 * SLACK, said)
        lines = [line for line in said.split("\n") if " was " in line]
        self.assertEqual(len(lines), 3, said)
        for rank, words in enumerate([r"at .*train.py:21, in allgather '[^']*' for \d+\.\d s",
                                      "at .*train.py:12, in load, before its first operation",
                                      "at .*train.py:1[67], in spin, before its first operation"]):
            self.assertRegex(said, rf"horovodrun: rank {rank} was {words}\n")

    def test_who_is_stopped_by_ctrl_c_says_where_it_was(self):
        self.check_stopped(signal.SIGINT)

    def test_who_is_stopped_by_a_scheduler_says_where_it_was(self):
        self.check_stopped(signal.SIGTERM)


if __name__ == "__main__":
    main()
