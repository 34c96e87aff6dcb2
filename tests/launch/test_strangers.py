#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Somebody without the secret at every port of a running job of horovodrun.

Published attacks on services of this kind (a pickle in an HTTP PUT to the rendezvous, a poisoned
GET), claims of 2 GiB, ten thousand idle connections: nothing that was sent is run, connections are
dropped, nobody grows by more than 32 MiB, and the job's sums stay right.

Usage: test_strangers.py BUILD-DIRECTORY [unittest arguments]
"""
import os
import pathlib
import resource
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time

from launching import (BUILD, HOROVODRUN, ROOT, SLACK, Case, Job, clean_environment,
                       eventually, main, process_ids, read)

MARK_FILE = f"/tmp/hvd-test-was-run-{os.getpid()}"
PICKLE = f"cposix\nsystem\n(S'touch {MARK_FILE}'\ntR.".encode()
CLAIM = struct.pack("<I", 0x7fffffff)
N_IDLE = 10_000
N_CROWD = 600
CORE_BYTES = 1 << 30
LEAST_IDLE = 500  # what a user who may not raise the limit can still do
MORE_KIB = 32 * 1024
ANSWER_BYTES = 7  # a TLS alert is all that is ever said
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
CUT_S = 10 * SLACK  # an agent's port gives newcomers 10 s
HELLO = b"\x8bhvd\r\n\x1a\n\x01\x00\x02\x01\x01\x00\x00\x00"

# What is sent; each did harm, or blocked for ever, in some service of this kind.
FOREIGN = {
    "PUT of a pickle": b"PUT /runfunc/func HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
                       % len(PICKLE) + PICKLE,
    "PUT of a rank's place": b"PUT /rank_and_size/localhost:0 HTTP/1.1\r\nHost: a\r\n"
                             b"Content-Length: %d\r\n\r\n" % len(PICKLE) + PICKLE,
    "PUT of 2 GiB": b"PUT /x/y HTTP/1.1\r\nContent-Length: 2147483647\r\n\r\n" + PICKLE,
    "poisoned GET": b"GET /global/../../runfunc/func?" + b"A" * 4096 + b" HTTP/1.1\r\n\r\n",
    "GET": b"GET /rendezvous/rank_0 HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n",
    "DELETE": b"DELETE /global/0 HTTP/1.1\r\nHost: a.example\r\n\r\n",
    "digest, 2 GiB, pickle": b"0123456789abcdef" * 2 + CLAIM + PICKLE * 4,
    "frame of 2 GiB": CLAIM + b"\x02" + PICKLE * 4,
    "our hello, then 2 GiB": HELLO + b"x" * 48 + CLAIM + PICKLE,
    "TLS record of 16 KiB": b"\x16\x03\x01\x40\x00" + b"\x01\x00\x3f\xfc" + b"\x03\x03" + b"r" * 64,
    "ssh": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n" + b"k" * 64,
    "one byte": b"x",
    "nothing": b"",
}


def socket_inodes(pid):
    found = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            if link.startswith("socket:["):
                found.add(link[8:-1])
    except OSError:
        pass
    return found


def doors(pids):
    """(address, port) of every TCP socket at which any of the processes listens."""
    inodes = set().union(*map(socket_inodes, pids))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and cells[9] in inodes:
                digits, _, port = cells[1].partition(":")
                words = [int(digits[i:i + 8], 16) for i in range(0, len(digits), 8)]
                address = socket.inet_ntop(family, struct.pack(f"<{len(words)}I", *words))
                found.add((ANYWHERE.get(address, address), int(port, 16)))
    return sorted(found)


def family_of(pid):
    """A process and all it has started."""
    found, n_before = {pid}, 0
    while len(found) > n_before:
        n_before = len(found)
        for child in process_ids():
            stat = read(child, "stat")
            if stat and int(stat[stat.rindex(b")") + 2:].split()[1]) in found:
                found.add(child)
    return found


def all_memory_kib(pids):
    """What they take together, shared pages counted once."""
    total = 0
    for pid in pids:
        for line in read(pid, "smaps_rollup").decode().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total


def call(door):
    return socket.create_connection(door, timeout=10 * SLACK)


def raise_limit(n):
    """How many connections we may hold, at most n."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n + 200, max(hard, n + 200)))
    except (ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(n, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)


def allow_cores():
    resource.setrlimit(resource.RLIMIT_CORE, (CORE_BYTES, CORE_BYTES))


class Strangers(Case):
    """A job with a rank started here and one by an agent that waits at a port."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)
        self.secret = self.place / "secret"
        self.secret.touch(0o600)
        self.secret.write_text(os.urandom(32).hex())
        self.steps = self.place / "steps"
        subprocess.run(["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include",
                        ROOT / "tests/launch/steps.c", f"-L{BUILD}", "-lhvd",
                        f"-Wl,-rpath,{BUILD}", "-o", self.steps], check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.agent_port = free.getsockname()[1]
        with open(self.place / "log", "wb") as log:
            self.server = subprocess.Popen(
                [HOROVODRUN, "--serve-agents", "--agent-port", str(self.agent_port),
                 "--secret-file", self.secret], env=clean_environment(), stderr=log)
        self.addCleanup(self.server.wait)
        self.addCleanup(self.server.terminate)
        # Called as ssh would be: a host and a command; the agent at the port takes both places.
        fake = self.place / "fake"
        fake.write_text(f"#!/bin/sh\nexec {HOROVODRUN} --dial-agent 127.0.0.1 "
                        f"--agent-port {self.agent_port} --secret-file {self.secret}\n")
        fake.chmod(0o755)
        self.job = Job("-H", "localhost:1,elsewhere.invalid:1", "--ssh-command", fake,
                       self.steps, self.place / "over")
        self.addCleanup(self.job.kill)
        for _ in range(2):
            self.assertIn(b"ready", self.job.process.stdout.readline())

    def processes(self):
        return sorted(family_of(self.job.process.pid) | family_of(self.server.pid))

    def doors(self):
        """Those of the rendezvous, the agent's port, and the two ranks."""
        found = doors(self.processes())
        self.assertIn(self.agent_port, [port for _, port in found])
        self.assertGreaterEqual(len(found), 4)
        return found

    def finish_job(self):
        """The job is unharmed: it goes on, its sums are right, and it ends when it is asked to."""
        (self.place / "over").touch()
        code, out, err = self.job.wait()
        self.assertEqual(code, 0, err.decode())
        self.assertEqual(out.count(b"steps, HVD_OK"), 2)
        self.assertFalse(os.path.exists(MARK_FILE), "what was sent has been run")
        self.assertIsNone(self.server.poll())
        lines = (self.place / "log").read_text().count("\n")
        self.assertLess(lines, 40, "every stranger gets a line in the log")

    def expect_cut(self, connection, what):
        answer = b""
        connection.settimeout(CUT_S)
        try:
            while data := connection.recv(4096):
                answer += data
        except ConnectionError:
            pass
        except TimeoutError:
            self.fail(f"{what}: not cut")
        self.assertLessEqual(len(answer), ANSWER_BYTES, f"{what}: {answer[:80]}")
        connection.close()

    def test_attacks(self):
        there = self.doors()
        before = all_memory_kib(self.processes())
        calls = []
        for door in there:
            for what, data in FOREIGN.items():
                connection = call(door)
                connection.sendall(data)
                calls.append((connection, f"{what} at {door}"))
        self.assertLess(all_memory_kib(self.processes()) - before, MORE_KIB)
        for connection, what in calls:
            self.expect_cut(connection, what)
        self.assertLess(all_memory_kib(self.processes()) - before, MORE_KIB)
        self.finish_job()

    def test_idle_crowd(self):
        n = raise_limit(N_IDLE)
        self.assertGreater(n, LEAST_IDLE)
        there = self.doors()
        before = all_memory_kib(self.processes())
        crowd = []
        for i in range(n):
            door = there[i % len(there)]
            connection = socket.socket(socket.AF_INET6 if ":" in door[0] else socket.AF_INET)
            connection.setblocking(False)
            connection.connect_ex(door)
            crowd.append(connection)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            self.assertLess(all_memory_kib(self.processes()) - before, MORE_KIB)
            time.sleep(0.5)
        # Who has the secret still gets in.
        code, _, err = Job("-H", "other.invalid:1", "--ssh-command", self.place / "fake",
                           "true").wait()
        self.assertEqual(code, 0, err.decode())
        self.finish_job()
        for connection in crowd:
            connection.close()


class AgentPort(Case):
    """The port of --serve-agents alone, while many strangers crowd it and while it is killed."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)
        self.secret = self.place / "secret"
        self.secret.touch(0o600)
        self.secret.write_text(os.urandom(32).hex())
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        log = open(self.place / "log", "wb")
        self.addCleanup(log.close)
        self.server = subprocess.Popen(
            [HOROVODRUN, "--serve-agents", "--agent-port", str(self.port), "--secret-file",
             self.secret], env=clean_environment(), stderr=log, cwd=self.place,
            preexec_fn=allow_cores)
        self.addCleanup(self.server.wait)
        self.addCleanup(self.server.kill)
        self.fake = self.place / "fake"
        self.fake.write_text(f"#!/bin/sh\nexec {HOROVODRUN} --dial-agent 127.0.0.1 "
                             f"--agent-port {self.port} --secret-file {self.secret}\n")
        self.fake.chmod(0o755)

    def launch(self, *command):
        job = Job("-H", "there.invalid:1", "--ssh-command", self.fake, *command)
        self.addCleanup(job.kill)
        return job

    def crowd(self, n):
        """Connections that have sent one byte; those that no longer get in are not waited for."""
        found = []
        for _ in range(n):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", self.port))
            found.append(connection)
            self.addCleanup(connection.close)
        time.sleep(0.2)
        for i, connection in enumerate(found):
            try:
                connection.send(HELLO[:1])
                if i % 3 == 0:
                    connection.shutdown(socket.SHUT_WR)  # half-open from here on
            except OSError:
                pass
        return found

    def test_launches_go_on_in_a_crowd(self):
        code, _, err = self.launch("true").wait()
        self.assertEqual(code, 0, err.decode())
        over = threading.Event()
        crowd = self.crowd(N_CROWD)

        def drip():  # slow ones: a byte of the hello now and then, and they read nothing
            for i in range(1, len(HELLO)):
                for connection in crowd:
                    try:
                        connection.send(HELLO[i:i + 1])
                    except OSError:
                        pass
                if over.wait(0.3):
                    return

        slow = threading.Thread(target=drip)
        slow.start()
        try:
            for _ in range(3):
                crowd += self.crowd(N_CROWD // 3)
                self.assertEqual(family_of(self.server.pid), {self.server.pid},
                                 "a process for a stranger")
                begun = time.monotonic()
                code, _, err = self.launch("true").wait()
                self.assertEqual(code, 0, err.decode())
                self.assertLess(time.monotonic() - begun, 5 * SLACK)
        finally:
            over.set()
            slow.join()
        for connection in crowd:
            connection.close()
        code, _, err = self.launch("true").wait()
        self.assertEqual(code, 0, err.decode())
        lines = (self.place / "log").read_text().splitlines()
        self.assertLessEqual(len(lines), 3, lines)

    def cores(self):
        return [path.name for path in self.place.glob("core*")]

    def test_no_core_files(self):
        """Neither of the server, nor of a guest's process, nor of the agent."""
        other = subprocess.Popen(["sleep", "60"], cwd=self.place, preexec_fn=allow_cores)
        other.send_signal(signal.SIGABRT)
        other.wait()
        if not self.cores():
            self.skipTest("core files are not written to the directory of a process here: see "
                          "/proc/sys/kernel/core_pattern")
        for name in self.cores():
            (self.place / name).unlink()
        job = self.launch("sleep", "60")

        def ours():
            return [pid for pid in family_of(self.server.pid)
                    if HOROVODRUN.name.encode() in read(pid, "cmdline")]

        # Server, guest, agent, supervisor, rank.
        self.assertTrue(eventually(lambda: len(family_of(self.server.pid)) >= 5, 10 * SLACK))
        there = [pid for pid in ours() if b"supervisor" not in read(pid, "comm")]
        self.assertEqual(len(there), 3)
        for pid in there:
            os.kill(pid, signal.SIGABRT)
        self.server.wait(10)
        self.assertEqual(self.server.returncode, -signal.SIGABRT)
        self.assertEqual(job.left_behind(10 * SLACK), [])
        self.assertEqual(self.cores(), [])


if __name__ == "__main__":
    main()
