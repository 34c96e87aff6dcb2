#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What hvd-info and hvd-bench remove of what dead ranks leave, and what they do not; what hvd-info
says of ranks that do not answer.

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
import tempfile
import time
import unittest

BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()
TIMEOUT_S = 60

# A rank that listens at a path and goes no further.
STOPS = """
import os, signal, socket, sys

rank = socket.socket(socket.AF_UNIX)
rank.bind(sys.argv[1])
rank.listen()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def listen_at(path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def leave_socket(path):
    """What a killed rank leaves: a name that nobody listens at."""
    listen_at(path).close()


def listener_of(path):
    """The process behind a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        return struct.unpack("iii", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="hvd-info-")
        self.addCleanup(folder.cleanup)
        self.base = pathlib.Path(folder.name)


class Info(Case):
    def directory(self, name):
        path = self.base / name
        path.mkdir(mode=0o700)
        return path

    def info(self, *words, expect=0):
        """What it prints of the jobs below the base."""
        result = subprocess.run([BUILD / "hvd-info", "--live", *map(str, words)],
                                env={**os.environ, "HOROVOD_MONITOR_DIR": str(self.base)},
                                timeout=TIMEOUT_S, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)
        self.assertEqual(result.returncode, expect, result.stdout)
        return result.stdout

    def test_files_of_the_user_stay(self):
        mine, empty = self.directory("mine"), self.directory("empty")
        for name in ("rank-0.pt", "rank-0.sock", "rank-1.sock.bak"):
            (mine / name).write_text("precious")
        for words in ([], ["mine"], [mine], [f"{self.base}/"], ["empty"], [empty]):
            self.info(*words, expect=1)
            self.assertEqual(len(list(mine.iterdir())), 3, words)
            self.assertTrue(empty.is_dir(), words)

    def test_dead_ranks_are_removed_with_their_directory(self):
        for how in ("all", "name", "path", "base"):
            with self.subTest(how):
                job = self.directory("job-1")
                leave_socket(job / "rank-0.sock")
                leave_socket(job / "rank-1.sock")
                words = {"all": [], "name": ["job-1"], "path": [job], "base": [f"{self.base}/"]}
                self.assertIn("no rank of", self.info(*words[how], expect=1))
                self.assertFalse(job.exists())

    def test_all_are_asked_at_once(self):
        job = self.directory("job-1")
        for rank in range(8):
            self.addCleanup(listen_at(job / f"rank-{rank}.sock").close)  # none ever answers
        begin = time.monotonic()
        told = self.info()
        self.assertLess(time.monotonic() - begin, 4)
        self.assertEqual(told.count("no answer"), 8)
        self.assertIn(f"{os.getpid()}  no answer  -      its process is", told)

    def test_stopped_rank(self):
        path = self.directory("job-1") / "rank-0.sock"
        rank = subprocess.Popen([sys.executable, "-c", STOPS, path])
        self.addCleanup(rank.wait)
        self.addCleanup(rank.kill)
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
        self.assertIn("its process is stopped (state T); kill -CONT continues it", self.info())


class Bench(Case):
    def start(self):
        """A benchmark that runs for long, and the processes of its two ranks."""
        bench = subprocess.Popen([BUILD / "hvd-bench", "--ranks", "2", "--bytes", "65536",
                                  "--budget", "600", "--max-samples", "10000000", "--env",
                                  f"HOROVOD_MONITOR_DIR={self.base}"],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(bench.kill)
        while len(sockets := list(self.base.glob("*/rank-*.sock"))) < 2:
            self.assertIsNone(bench.poll())
            time.sleep(0.01)
        return bench, [listener_of(path) for path in sockets]

    def test_killed_rank(self):
        bench, ranks = self.start()
        os.kill(ranks[0], signal.SIGKILL)
        self.assertNotEqual(bench.wait(TIMEOUT_S), 0)
        self.assertEqual(list(self.base.iterdir()), [])

    def test_ranks_go_with_it(self):
        bench, ranks = self.start()
        watched = [os.pidfd_open(rank) for rank in ranks]
        bench.kill()
        for end in watched:
            self.addCleanup(os.close, end)
            self.assertEqual(select.select([end], [], [], TIMEOUT_S)[0], [end])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
