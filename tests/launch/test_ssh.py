#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Jobs of horovodrun over ssh, between network namespaces that play hosts.

Usage: test_ssh.py BUILD-DIRECTORY [unittest arguments]     (as root)
"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from launching import (BUILD, HOROVODRUN, HVD_INFO, ROOT, SLACK, Case, Job, command_line,
                       eventually, main, python, read, variable, write_packages)
from world import World, sh

# c has hardly any shared memory and few descriptors.
HOSTS = {"a": ("eth7", ""), "b": ("net3", ""),
         "c": ("ib9", "mount --make-rprivate /; mount -t tmpfs -o size=1m tmpfs /dev/shm; "
                      "ulimit -n 256;")}
WORLD = None


def setUpModule():
    global WORLD
    WORLD = World(HOSTS)


def tearDownModule():
    WORLD.close()


def launch(*words, config="config", **options):
    return Job("--ssh-command", f"ssh -F {WORLD.config(config)}", *words,
               before=WORLD.inside("launcher"), **options)


class Ssh(Case):
    def run_job(self, *words, expect=0, timeout=60, **options):
        job = launch(*words, **options)
        code, out, err = job.wait(timeout)
        out, err = out.decode(), err.decode()
        self.assertEqual(code, expect, f"{words}:\n{out}\n{err}")
        self.finish(job, 5)
        self.assert_empty()
        return out, err

    def assert_empty(self):
        for host in HOSTS:
            self.assertTrue(eventually(lambda host=host: not WORLD.processes(host), 5 * SLACK),
                            [command_line(pid) for pid in WORLD.processes(host)])

    def start_sleepers(self, *words):
        job = launch("-H", "a:2,b:2", *words, "sh", "-c", "echo ready; sleep 1000 & wait")
        for _ in range(4):
            self.assertIn(b"ready", job.process.stdout.readline())
        return job


class Running(Ssh):
    def test_two_hosts_of_two_ranks(self):
        out, err = self.run_job("-H", "a:2,b:2", HVD_INFO, "--transports")
        for rank in range(4):
            self.assertIn(f"transports of rank {rank} of 4", out)
        self.assertRegex(out, r"\[0\]<stdout>:.*from rank 0 to rank 1 +shm")
        self.assertRegex(out, r"\[0\]<stdout>:.*from rank 0 to rank 2 +tcp")
        self.assertEqual(err, "")

    def test_environment_directory_and_names(self):
        code = ("import os, socket; e = os.environ; print(e['HOROVOD_RANK'], socket.gethostname(), "
                "os.getcwd(), e['SOMETHING'], e['HOROVOD_HOSTNAME'], 'SSH_CONNECTION' in e)")
        with tempfile.TemporaryDirectory() as directory:
            out, _ = self.run_job("-H", "root@a:1,b:1", *python(code), cwd=directory,
                                  env={"SOMETHING": "it's"})
            place = os.path.realpath(directory)
        self.assertIn(f"[0]<stdout>:0 a {place} it's a True\n", out)
        self.assertIn(f"[1]<stdout>:1 b {place} it's b True\n", out)

    def test_output_is_whole(self):
        n = 20000
        code = f"import os; [print(os.environ['HOROVOD_RANK'], i) for i in range({n})]"
        out, _ = self.run_job("-H", "a:1,b:1", *python(code))
        for rank in range(2):
            self.assertEqual(re.findall(rf"^\[{rank}\]<stdout>:{rank} (\d+)$", out, re.M),
                             [str(i) for i in range(n)])

    def test_hostfile_and_exit_code_of_another_host(self):
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("# two\na slots=1\nb:1\n")
            file.flush()
            _, err = self.run_job("--hostfile", file.name, "sh", "-c",
                                  "[ $HOROVOD_RANK = 0 ] && exec sleep 1000; echo why >&2; exit 9",
                                  expect=9)
        self.assertIn("because of rank 1: exit code 9", err)
        self.assertIn("on host b", err)
        self.assertIn("| why", err)

    def test_interface_by_name(self):
        self.run_job("-H", "a:1", "--network-interfaces", "eth7,br0", HVD_INFO, "--transports")

    def test_secret_is_in_no_command_or_environment(self):
        job = self.start_sleepers()
        rank = next(pid for pid in WORLD.processes("b") if variable(pid, "HOROVOD_RANK"))
        secret = pathlib.Path(variable(rank, "HOROVOD_SECRET_FILE")).read_bytes()
        self.assertEqual(len(secret), 64)
        for name in os.listdir("/proc"):
            if name.isdigit():
                self.assertNotIn(secret, command_line(name))
                self.assertNotIn(secret, read(name, "environ"))
        job.process.send_signal(signal.SIGTERM)
        self.assertEqual(job.wait()[0], 143)
        self.assert_empty()


class Waiting(Ssh):
    """Agents that wait at a port, in place of ssh."""

    def setUp(self):
        self.secret = WORLD.config("secret")
        self.secret.write_text(os.urandom(32).hex())
        self.secret.chmod(0o600)

    def serve(self, host, secret=None):
        server = subprocess.Popen(
            [*WORLD.inside(host), HOROVODRUN, "--serve-agents", "--agent-port", "23023",
             "--secret-file", secret or self.secret], stderr=subprocess.PIPE)
        self.addCleanup(server.stderr.close)
        self.addCleanup(server.wait)
        self.addCleanup(server.terminate)
        return server

    def launch(self, *words, **options):
        return self.run_waiting("--agent-port", 23023, "--secret-file", self.secret, *words,
                                **options)

    def run_waiting(self, *words, expect=0):
        job = Job(*words, before=WORLD.inside("launcher"))
        code, out, err = job.wait()
        self.assertEqual(code, expect, err.decode())
        self.finish(job, 5)
        return out.decode(), err.decode()

    def test_job_without_ssh(self):
        for host in ("a", "b"):
            self.serve(host)
        # They may come later than the launcher; names are looked up here, not by ssh.
        out, _ = self.launch("-H", "10.93.0.2:1,10.93.0.3:2", HVD_INFO, "--transports")
        self.assertRegex(out, r"\[0\]<stdout>:.*from rank 0 to rank 1 +tcp")
        self.assertRegex(out, r"\[1\]<stdout>:.*from rank 1 to rank 2 +shm")
        _, err = self.launch("-H", "10.93.0.3:2", "sh", "-c", "exit 4", expect=4)
        self.assertIn("on host 10.93.0.3", err)

    def test_ranks_end_with_the_launcher_and_with_the_server(self):
        server = self.serve("b")
        for victim in ("launcher", "server"):
            with self.subTest(victim=victim):
                job = Job("--agent-port", 23023, "--secret-file", self.secret, "-H", "10.93.0.3:2",
                          "sh", "-c", "echo ready; sleep 1000 & wait",
                          before=WORLD.inside("launcher"))
                for _ in range(2):
                    self.assertIn(b"ready", job.process.stdout.readline())
                (job.process if victim == "launcher" else server).kill()
                self.assertTrue(eventually(
                    lambda: not any(variable(pid, "HOROVOD_RANK") for pid in WORLD.processes("b")),
                    2 * SLACK))
                self.finish(job, 10)

    def test_another_secret_is_refused(self):
        other = WORLD.config("other-secret")
        other.write_text(os.urandom(32).hex())
        other.chmod(0o600)
        server = self.serve("a", other)
        _, err = self.launch("-H", "10.93.0.2:1", "true", expect=69)
        self.assertIn("host 10.93.0.2", err)
        self.assertIn("a different secret", err)
        self.assertIsNone(server.poll())

    def test_nobody_waits(self):
        _, err = self.launch("-H", "10.93.0.2:1", "--start-timeout", 2, "true", expect=75)
        self.assertIn("no agent is waiting on that port", err)
        self.assertIn("--serve-agents", err)

    def test_unknown_hosts_are_named_at_once(self):
        self.serve("a")
        job = Job("--agent-port", 23023, "--secret-file", self.secret, "--start-timeout", 60,
                  "-H", "10.93.0.2:1,nobody.invalid:1", "true", before=WORLD.inside("launcher"))
        self.addCleanup(job.kill)
        begin = time.monotonic()
        line = job.process.stderr.readline().decode()
        self.assertLess(time.monotonic() - begin, 5 * SLACK)
        self.assertIn("host nobody.invalid: the name cannot be resolved", line)
        self.assertIn("60 s", line)
        job.process.send_signal(signal.SIGTERM)
        self.assertEqual(job.wait()[0], 143)


class Dying(Ssh):
    def test_killed_agent(self):
        job = self.start_sleepers()
        agent = next(pid for pid in WORLD.processes("b")
                     if b"--agent" in command_line(pid) and b"supervisor" not in read(pid, "comm"))
        os.kill(agent, signal.SIGKILL)
        code, _, err = job.wait()
        self.assertEqual(code, 69)
        self.assertIn("lost the agent on host b", err.decode())
        self.assert_empty()
        self.finish(job, 5)

    def test_killed_launcher(self):
        job = self.start_sleepers()
        job.process.kill()
        self.assertTrue(eventually(lambda: not any(variable(pid, "HOROVOD_RANK") for host in HOSTS
                                                   for pid in WORLD.processes(host)), 2 * SLACK))
        self.assert_empty()
        self.finish(job, 10)

    def test_cut_network(self):
        job = self.start_sleepers("--gloo-timeout-seconds", 4)
        WORLD.set_link("b", "down")
        try:
            code, _, err = job.wait()
            self.assertEqual(code, 69)
            self.assertIn("lost the agent on host b", err.decode())
            self.assertTrue(eventually(
                lambda: not any(variable(pid, "HOROVOD_RANK") for pid in WORLD.processes("b")),
                6 * SLACK))
        finally:
            WORLD.set_link("b", "up")
        for pid in WORLD.processes("b"):  # the session sshd keeps until it notices
            os.kill(pid, signal.SIGKILL)
        self.finish(job, 5)


class Elastic(Ssh):
    def test_cut_host_is_left_out(self):
        """The network to one host goes: the job goes on with the others, from where it was."""
        with tempfile.TemporaryDirectory() as folder:
            job = launch("-H", "a:1,b:1", "-np", 2, "--min-np", 1, "--gloo-timeout-seconds", 4,
                         *python((ROOT / "tests/launch/elastic_rank.py").read_text()), folder,
                         env={"PYTHONPATH": str(BUILD / "python")})
            self.addCleanup(job.kill)
            self.read_until(job, b"step 3 rank 0 of 2")
            WORLD.set_link("b", "down")
            try:
                line = self.read_until(job, b"rank 0 of 1 on a")
                self.assertGreater(int(line.split()[1]), 3)
                pathlib.Path(folder, "over").touch()
                code, out, err = job.wait()
            finally:
                WORLD.set_link("b", "up")
            self.assertEqual(code, 0, err.decode())
            self.assertIn(b"done rank 0 of 1", out)
            self.assertIn(b"lost the agent on host b", err)
            self.assertTrue(eventually(
                lambda: not any(variable(pid, "HOROVOD_RANK") for pid in WORLD.processes("b")),
                6 * SLACK))
        for pid in WORLD.processes("b"):  # the session sshd keeps until it notices
            os.kill(pid, signal.SIGKILL)
        self.finish(job, 5)

    def go_on_without_b(self, cut, mend, *words):
        """How long it takes until the others go on."""
        with tempfile.TemporaryDirectory() as folder:
            job = launch("-H", "a:1,b:1", "-np", 2, "--min-np", 1, *words,
                         *python((ROOT / "tests/launch/elastic_rank.py").read_text()), folder,
                         env={"PYTHONPATH": str(BUILD / "python")})
            self.addCleanup(job.kill)
            self.read_until(job, b"step 3 rank 0 of 2")
            cut()
            begun = time.monotonic()
            try:
                self.read_until(job, b"rank 0 of 1 on a")
                elapsed = time.monotonic() - begun
                pathlib.Path(folder, "over").touch()
                code, out, err = job.wait()
            finally:
                mend()
            self.assertEqual(code, 0, err.decode())
            self.assertIn(b"done rank 0 of 1", out)
            self.assertIn(b"the other ranks cannot reach rank 1 on host b", err)
        for pid in WORLD.processes("b"):  # the session sshd keeps until it notices
            os.kill(pid, signal.SIGKILL)
        self.finish(job, 5)
        print(f"{elapsed:.1f} s", end=" ", file=sys.stderr)
        return elapsed

    def test_cut_host_is_left_out_soon(self):
        """Ranks notice it long before the launcher gives the agent up."""
        elapsed = self.go_on_without_b(lambda: WORLD.set_link("b", "down"),
                                       lambda: WORLD.set_link("b", "up"))
        self.assertLess(elapsed, 3 + 4 * SLACK)  # HOROVOD_NETWORK_TIMEOUT_SECONDS, and the rest

    def test_cut_ranks_whose_agent_lives(self):
        """All but ssh is cut: the launcher still hears the agent, and that its ranks."""
        def cut():
            rules = ("add table ip cut; add chain ip cut in { type filter hook input priority 0; };"
                     "add chain ip cut out { type filter hook output priority 0; }; "
                     "add rule ip cut in tcp dport != 2222 drop; "
                     "add rule ip cut out tcp sport != 2222 drop")
            sh(*WORLD.inside("b"), "nft", rules)

        def mend():
            sh(*WORLD.inside("b"), "nft", "delete table ip cut")

        elapsed = self.go_on_without_b(cut, mend)
        self.assertLess(elapsed, 3 + 4 * SLACK)

    def read_until(self, job, part):
        deadline = time.monotonic() + 60
        while part not in (line := job.process.stdout.readline()):
            if not line or time.monotonic() > deadline:
                self.fail(f"never {part}: {job.wait()[2].decode()}")
        return line


class Faults(Ssh):
    """Planted faults in the set-up: each named, with its fix, within the start timeout."""

    def assert_fault(self, words, parts, code=69, **options):
        begin = time.monotonic()
        _, err = self.run_job("--start-timeout", 8, "--ssh-attempts", 2, *words, expect=code,
                              **options)
        self.assertLess(time.monotonic() - begin, 8 * SLACK)
        for part in parts:
            self.assertIn(part, err)

    def test_wrong_port(self):
        self.assert_fault(["-H", "a:1", "-p", 2223, "true"], ["host a", "nothing listens", "-p"])

    def test_host_key(self):
        self.assert_fault(["-H", "a:1", "true"], ["host a", "does not trust", "--ssh-accept-new"],
                          config="unknown-host")
        self.run_job("--ssh-accept-new", "-H", "a:1", "true", config="unknown-host")

    def test_key_not_accepted(self):
        self.assert_fault(["-H", "a:1", "true"], ["host a", "denied access", "ssh-copy-id"],
                          config="other-key")

    def test_dead_host(self):
        job = launch("--start-timeout", 6, "--ssh-attempts", 1, "-H", "a:1,nobody:1", "true")
        code, _, err = job.wait()
        self.assertIn(code, (69, 75))
        self.assertIn("nobody", err.decode())
        self.assertRegex(err.decode(), "cannot be reached|did not answer")
        self.finish(job, 5)

    def test_no_such_command_there(self):
        self.assert_fault(["-H", "a:1", "nosuchpython"],
                          ["host a", "cannot start nosuchpython", "PATH"], code=127)

    def test_no_such_directory_there(self):
        with tempfile.TemporaryDirectory() as directory:
            # Only the launcher sees what is mounted here.
            job = Job("--ssh-command", f"ssh -F {WORLD.config()}", "-H", "a:1", "true",
                      before=[*WORLD.inside("launcher"), "unshare", "--mount", "sh", "-c",
                              f"mount -t tmpfs tmpfs {directory}; mkdir {directory}/in; "
                              f"cd {directory}/in; exec \"$@\"", "sh"])
            code, _, err = job.wait()
        self.assertEqual(code, 126 if b"No such" not in err else 127, err)
        self.assertIn("cannot change to the directory", err.decode())
        self.assertIn("must exist on all hosts", err.decode())

    def test_interface_of_another_host(self):
        # The launcher has it; the host does not, and says what it has.
        self.assert_fault(["-H", "a:1,b:1", "--network-interfaces", "br0", HVD_INFO,
                           "--transports"],
                          ["no network interface is called br0", "eth7", "HOROVOD_GLOO_IFACE"],
                          code=1)

    def test_small_shared_memory(self):
        # The job goes on over sockets, and says why and what to do.
        out, err = self.run_job("-H", "c:2", HVD_INFO, "--transports")
        self.assertRegex(out, "from rank 0 to rank 1 +tcp")
        self.assertIn("/dev/shm has 0 MiB free", err)
        self.assertIn("--shm-size", err)

    def test_full_disk(self):
        with tempfile.TemporaryDirectory() as directory:
            sh("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", directory)
            try:
                # Fills up while the job runs: told, and the job goes on.
                _, err = self.run_job("-H", "a:1", "--output-filename", f"{directory}/logs",
                                      *python("print('x' * 200000)"))
                self.assertIn("No space left on device", err)
                # Full from the start: no job.
                self.assert_fault(["-H", "a:1", "--output-filename", f"{directory}/more", "true"],
                                  ["free some"], code=74)
            finally:
                sh("umount", directory)

    def examine(self, hosts, torch, expect=0):
        """--doctor with a Python that has a horovod, and this text as torch."""
        with tempfile.TemporaryDirectory() as place:
            write_packages(pathlib.Path(place), torch=torch)
            script = pathlib.Path(place, "train.py")
            script.write_text("import horovod\n")
            return self.run_job("--doctor", "-H", hosts, sys.executable, script, expect=expect,
                                env={"PYTHONPATH": place})

    def test_doctor_finds_nothing_wrong(self):
        out, err = self.examine("a,b", "__version__ = '1.0'")
        self.assertIn("no faults found", out, err)
        self.assertIn("rank 0 on a, rank 1 on b", out)
        for rank in range(2):
            self.assertRegex(out, rf"rank {rank} sends to the others: \d+ MB/s")
        self.assertRegex(out, r"reaches the launcher at: 10\.93\.0\.1 yes")
        self.assertIn("hostname: b (127.0.1.1)", out)
        self.assertEqual(out.count("ok     torch: 1.0"), 2)

    def test_doctor_compares_versions(self):
        out, _ = self.examine("a,b", "import socket\n__version__ = '1.' + socket.gethostname()",
                              expect=1)
        self.assertIn("FAULT  torch differs between hosts: 1.a on a; 1.b on b\n         fix: ", out)
        self.assertTrue(out.endswith("1 fault found\n"), out)
        self.assertNotIn("trial job", out)

    def test_doctor_finds_what_is_wrong(self):
        out, _ = self.run_job("--doctor", "-H", "c,nobody", "--start-timeout", 6, expect=1)
        for part in ["FAULT  shared memory", "--shm-size", "FAULT  open files: 256", "ulimit -n",
                     "host nobody"]:
            self.assertIn(part, out)


if __name__ == "__main__":
    if os.getuid() != 0:
        raise SystemExit("test_ssh.py makes network namespaces: run it as root")
    subprocess.run(["ip", "-V"], check=True, stdout=subprocess.DEVNULL)
    main()
