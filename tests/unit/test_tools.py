#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which sockets hvd-info believes, what it says of ranks that do not answer; how hvd-bench ends.

Ranks of hvd-info are sockets of this program here; tests/ranks/test_live.c has real jobs.

Usage: test_tools.py BUILD-DIRECTORY [unittest arguments]
"""
import os
import pathlib
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import unittest

BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()
TIMEOUT_S = 60

NOBODY = 65534

# A rank that listens at a name and goes no further.
STOPS = """
import os, signal, socket, sys

rank = socket.socket(socket.AF_UNIX)
rank.bind("\\0" + sys.argv[1])
rank.listen()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def listen_at(name):
    """An abstract socket; the NUL in front is what makes it one."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + name)
    listener.listen()
    return listener


def listener_of(name):
    """The process behind a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + name)
        return struct.unpack("iii", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


class Case(unittest.TestCase):
    def setUp(self):
        self.job = f"tools-{os.getpid()}-{self.id().rpartition('.')[2]}"
        self.place = f"hvd-{os.geteuid()}/{self.job}"

    def sockets(self):
        """Names of the job's ranks that listen."""
        lines = pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]
        fields = [line.split() for line in lines]
        return [words[7][1:] for words in fields if int(words[3], 16) & 0x10000 and
                len(words) > 7 and words[7].startswith(f"@{self.place}/")]


class Info(Case):
    def info(self, *words, expect=0):
        result = subprocess.run([BUILD / "hvd-info", "--live", *words], timeout=TIMEOUT_S,
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(result.returncode, expect, result.stdout)
        return result.stdout

    def listen(self, name):
        listener = listen_at(name)
        self.addCleanup(listener.close)
        return listener

    def test_ways_to_name_a_job(self):
        self.listen(f"{self.place}/rank-3")
        for word in (self.job, self.place, f"@{self.place}", f"{self.place}/rank-3"):
            self.assertIn(f"{self.place}: 1 rank on this host", self.info(word))
        self.assertIn(f"{self.place}: 1 rank on this host", self.info())
        for word in (f"{self.job}x", self.job[:-1], f"{self.place}x", "hvd-1/" + self.job):
            self.assertIn(f"no rank of job {word} runs on this host", self.info(word, expect=1))

    def test_other_names_are_no_ranks(self):
        for name in ("rank-01", "rank--1", "rank-1x", "rank-1/x", "rank-", "rank-1 ", "x/rank-1"):
            self.listen(f"{self.place}/{name}")
        self.listen(f"hvd-0{os.geteuid()}/{self.job}/rank-2")
        self.assertEqual(len(self.sockets()), 7)
        self.assertIn("no rank of", self.info(self.job, expect=1))

    def test_who_has_gone_is_not_shown(self):
        self.listen(f"{self.place}/rank-0").close()
        self.assertIn("no rank of", self.info(self.job, expect=1))

    def test_connections_are_no_ranks(self):
        listener = self.listen(f"{self.place}/rank-0")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"\0{self.place}/rank-0")
            with listener.accept()[0]:  # its end has the same name in the kernel's list
                self.assertIn(": 1 rank on this host", self.info(self.job))

    @unittest.skipIf(os.geteuid() != 0, "only root can be somebody else")
    def test_other_users(self):
        os.seteuid(NOBODY)
        try:
            self.listen(f"{self.place}/rank-0")  # root's name, but not root's process
            self.listen(f"hvd-{NOBODY}/{self.job}/rank-1")
        finally:
            os.seteuid(0)
        self.assertIn("no rank of", self.info(self.place, expect=1))
        self.assertIn(f"hvd-{NOBODY}/{self.job}: 1 rank ", self.info(self.job))
        self.listen(f"{self.place}/rank-2")
        self.assertIn(f"{self.place}: 1 rank ", self.info(self.place))

    def test_all_are_asked_at_once(self):
        for rank in range(8):
            self.listen(f"{self.place}/rank-{rank}")  # none ever answers
        begin = time.monotonic()
        told = self.info(self.job)
        self.assertLess(time.monotonic() - begin, 4)
        self.assertEqual(told.count("no answer"), 8)
        self.assertIn(f"{os.getpid()}  no answer  -      its process is", told)

    def test_stopped_rank(self):
        rank = subprocess.Popen([sys.executable, "-c", STOPS, f"{self.place}/rank-0"])
        self.addCleanup(rank.wait)
        self.addCleanup(rank.kill)
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
        self.assertIn("its process is stopped (state T); kill -CONT continues it",
                      self.info(self.job))


class WrongOptions(unittest.TestCase):
    def check(self, program, words, told):
        done = subprocess.run([BUILD / program, *words], text=True, capture_output=True,
                              timeout=TIMEOUT_S)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(told, done.stderr.splitlines()[0])
        self.assertEqual(done.stdout, "")

    def test_of_the_bench(self):
        for name, value in [("op", "allredcue"), ("bytes", "-3"), ("bytes", "many"),
                            ("bytes", "4X"), ("bytes", "9999999999G"), ("dtype", "float"),
                            ("ranks", "0")]:
            with self.subTest(name=name, value=value):
                self.check("hvd-bench", [f"--{name}={value}"], f'--{name} cannot be "{value}"')

    def test_of_the_information(self):
        self.check("hvd-info", ["--lvie"], "unknown option --lvie, did you mean --live")
        self.check("hvd-info", ["nonsense"], "unknown option nonsense")
        self.check("hvd-info", ["--ranks", "two"],
                   '--ranks needs a whole number from 1 to 65536, not "two"')
        self.check("hvd-info", ["--ranks"], "--ranks needs a whole number")
        self.check("hvd-info", ["--ranks", "2", "--hosts", "4"],
                   "2 ranks cannot run on 4 hosts")


class Bench(Case):
    def start(self):
        """A benchmark that runs for long, and the processes of its two ranks."""
        bench = subprocess.Popen([BUILD / "hvd-bench", "--ranks", "2", "--bytes", "65536",
                                  "--budget", "600", "--max-samples", "10000000", "--env",
                                  f"HOROVOD_JOB_ID={self.job}"],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(bench.kill)
        while len(sockets := self.sockets()) < 2:
            self.assertIsNone(bench.poll())
            time.sleep(0.01)
        return bench, [listener_of(name) for name in sockets]

    def test_killed_rank(self):
        bench, ranks = self.start()
        os.kill(ranks[0], signal.SIGKILL)
        self.assertNotEqual(bench.wait(TIMEOUT_S), 0)
        self.assertEqual(self.sockets(), [])

    def test_ranks_go_with_it(self):
        bench, ranks = self.start()
        watched = [os.pidfd_open(rank) for rank in ranks]
        bench.kill()
        for end in watched:
            self.addCleanup(os.close, end)
            self.assertEqual(select.select([end], [], [], TIMEOUT_S)[0], [end])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
