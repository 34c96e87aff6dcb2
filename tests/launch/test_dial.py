#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Jobs of horovodrun on agents that dial their launcher, between network namespaces.

No host has an open port for its agent, and the launcher knows no addresses: an agent proves the
secret and says for which host of the list it stands.

Usage: test_dial.py BUILD-DIRECTORY [unittest arguments]     (as root)
"""
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from launching import (BUILD, HVD_INFO, ROOT, SLACK, Case, Job, command_line, eventually, main,
                       python, read)
from world import World

HOSTS = {"a": ("eth7", ""), "b": ("net3", "")}
PORT = 23111
LAUNCHER = f"10.93.0.250,10.93.0.1:{PORT}"  # nobody is at the first one
WORLD = None


def setUpModule():
    global WORLD
    WORLD = World(HOSTS)


def tearDownModule():
    WORLD.close()


class Dial(Case):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = pathlib.Path(place.name)
        self.secret = self.write_secret("secret")
        self.agents = {}

    def write_secret(self, name):
        path = self.place / name
        path.write_text(secrets.token_hex(32) + "\n")
        path.chmod(0o600)
        return path

    def start_agent(self, host, *words, name=None, secret=None, dial=LAUNCHER, env=None):
        """An agent on that host, which stands for `name` there."""
        agent = Job("--agent", "--dial", dial, "--secret-file", secret or self.secret,
                    "--agent-name", name or host, *words, before=WORLD.inside(host), env=env)
        self.agents[name or host] = agent
        self.addCleanup(agent.process.communicate)
        self.addCleanup(agent.kill)
        return agent

    def launch(self, *words, **options):
        job = Job("--await-agents", PORT, "--secret-file", self.secret, *words,
                  before=WORLD.inside("launcher"), **options)
        self.addCleanup(job.kill)
        return job

    def end(self, job, expect=0, timeout=60):
        """(stdout, stderr) of a job that has ended so, with all its agents."""
        code, out, err = job.wait(timeout)
        out, err = out.decode(), err.decode()
        self.assertEqual(code, expect, f"{out}\n{err}")
        self.finish(job, 5)
        self.assert_empty()
        return out, err

    def assert_empty(self):
        for host in HOSTS:
            self.assertTrue(eventually(lambda host=host: not WORLD.processes(host), 5 * SLACK),
                            [command_line(pid) for pid in WORLD.processes(host)])

    def start_sleepers(self, *words):
        for host in HOSTS:
            self.start_agent(host, *words)
        job = self.launch("-H", "a:2,b:2", *words, "sh", "-c", "echo ready; sleep 1000 & wait")
        for _ in range(4):
            self.assertIn(b"ready", job.process.stdout.readline())
        return job


class Running(Dial):
    def test_agents_before_and_after_their_launcher(self):
        self.start_agent("a")
        time.sleep(1)
        job = self.launch("-H", "a:2,b:2", HVD_INFO, "--transports")
        time.sleep(1)
        self.start_agent("b")
        out, err = self.end(job)
        for rank in range(4):
            self.assertIn(f"transports of rank {rank} of 4", out)
        self.assertRegex(out, r"\[0\]<stdout>:.*from rank 0 to rank 1 +shm")
        self.assertRegex(out, r"\[0\]<stdout>:.*from rank 0 to rank 2 +tcp")
        self.assertEqual(err, "")
        for agent in self.agents.values():
            self.assertEqual(agent.wait()[0], 0)

    def test_agents_that_nobody_has_named(self):
        """A rank for each; the launcher knows only how many there are to be."""
        self.start_agent("b", "--agent-slot", 1)
        job = self.launch("-np", 2, "sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE "
                                                "on $HOROVOD_HOSTNAME")
        self.start_agent("a", "--agent-slot", 0)
        out, err = self.end(job)
        self.assertEqual(sorted(out.splitlines()),
                         ["[0]<stdout>:0 of 2 on a", "[1]<stdout>:1 of 2 on b"])
        self.assertEqual(err, "")

    def test_a_rank_of_such_an_agent_fails(self):
        self.start_agent("a", "--agent-slot", 0)
        self.start_agent("b", "--agent-slot", 1)
        job = self.launch("-np", 2, "sh", "-c",
                          "[ $HOROVOD_RANK = 0 ] || { echo planted >&2; exit 5; }; sleep 1000")
        _, err = self.end(job, expect=5)
        self.assertRegex(err, r"because of rank 1: exit code 5\n +on host b")
        self.assertIn("planted", err)

    def test_too_few_of_such_agents(self):
        self.start_agent("a", "--agent-slot", 0, dial="10.93.0.1:" + str(PORT))
        job = self.launch("-np", 2, "--start-timeout", 8, "true")
        _, err = self.end(job, expect=75)
        self.assertIn("1 of 2 agents connected within 8 s (--start-timeout)", err)
        job = self.launch("true")
        _, err = self.end(job, expect=2)
        self.assertIn("give -np", err)

    def test_names_are_not_addresses(self):
        """Names of the list are keys; ranks know the launcher by the address that worked."""
        self.start_agent("b", name="task-0", dial="10.93.0.1:" + str(PORT))
        self.start_agent("a", "--agent-slot", 1, "--agent-about", "second", name="task-1")
        out, err = self.end(self.launch("-H", "task-0:1,task-1:1", "--verbose", "sh", "-c",
                                        "echo $HOROVOD_HOSTNAME ${HOROVOD_RENDEZVOUS_ADDR%%,*}"))
        self.assertIn("[0]<stdout>:task-0 10.93.0.1\n", out)
        self.assertIn("[1]<stdout>:task-1 10.93.0.1\n", out)
        self.assertIn("The agent of host task-1 has connected. second", err)

    def test_variables_that_ranks_keep(self):
        for host in HOSTS:
            self.start_agent(host, "--keep-env", "NONE,SIDE", env={"SIDE": host, "OTHER": host})
        out, _ = self.end(self.launch("-H", "a:1,b:1", "sh", "-c", "echo $SIDE $OTHER $NONE",
                                      env={"SIDE": "launcher", "OTHER": "launcher"}))
        self.assertIn("[0]<stdout>:a launcher\n", out)
        self.assertIn("[1]<stdout>:b launcher\n", out)

    def test_output_is_whole(self):
        n = 20000
        code = f"import os; [print(os.environ['HOROVOD_RANK'], i) for i in range({n})]"
        for host in HOSTS:
            self.start_agent(host)
        out, _ = self.end(self.launch("-H", "a:1,b:1", *python(code)))
        for rank in range(2):
            lines = [line for line in out.splitlines() if line.startswith(f"[{rank}]<stdout>:")]
            self.assertEqual(lines, [f"[{rank}]<stdout>:{rank} {i}" for i in range(n)])

    def test_any_port_and_the_secret_by_descriptor(self):
        place = self.place / "where"
        with open(self.secret, "rb") as file:
            job = Job("--await-agents", 0, "--await-file", place, "--secret-fd", file.fileno(),
                      "-H", "a:1", "echo", "here", before=WORLD.inside("launcher"),
                      pass_fds=[file.fileno()])
        self.addCleanup(job.kill)
        self.assertTrue(eventually(place.exists, 10))
        where = place.read_text().strip()
        self.assertRegex(where, r"10\.93\.0\.1.*:\d+$")
        self.start_agent("a", dial=where)
        out, err = self.end(job)
        self.assertEqual(out, "[0]<stdout>:here\n")
        self.assertIn(f"horovodrun --agent --dial {where}", err)

    def test_exit_codes_and_missing_commands(self):
        for command, code in (("exit 7", 7), ("kill -9 $$", 137), ("exec /no/such/thing", 127)):
            with self.subTest(command=command):
                self.start_agent("a")
                self.end(self.launch("-H", "a:1", "sh", "-c", command), expect=code)


class Faults(Dial):
    def test_other_secret(self):
        agent = self.start_agent("a", "--start-timeout", 2, secret=self.write_secret("other"))
        job = self.launch("-H", "a:1", "--start-timeout", 4, "true")
        _, err = self.end(job, expect=75)
        self.assertIn("no agent of that name has connected", err)
        code, _, said = agent.wait()
        self.assertEqual(code, 77)
        self.assertIn(b"the secret is not the same", said)

    def test_no_launcher(self):
        code, _, said = self.start_agent("a", "--start-timeout", 2).wait()
        self.assertNotIn(code, (0, 77))
        self.assertIn(f"no launcher at {LAUNCHER} within 2 s", said.decode())

    def test_nobody_dials_for_that_host(self):
        job = self.launch("-H", "a:1", "--start-timeout", 4, "true")
        agent = self.start_agent("a", name="elsewhere", dial=f"10.93.0.1:{PORT}")
        self.assertTrue(eventually(lambda: self.has_dialled(agent), 10))
        _, err = self.end(job, expect=75)
        self.assertIn("host a did not answer within 4 s", err)
        self.assertEqual(agent.wait()[0], 0)

    def test_no_secret(self):
        code, _, said = Job("--await-agents", PORT, "-H", "a:1", "true").wait()
        self.assertEqual(code, 2)
        self.assertIn(b"--secret-file", said)

    def test_launcher_is_killed(self):
        job = self.start_sleepers()
        job.process.kill()
        self.finish(job, 2 * SLACK)
        self.assert_empty()

    def test_launcher_is_told_to_end(self):
        job = self.start_sleepers()
        job.process.send_signal(signal.SIGTERM)
        self.end(job, expect=143)

    def test_launcher_is_killed_before_the_plan(self):
        agent = self.start_agent("a")
        job = self.launch("-H", "a:1,b:1", "--verbose", "true")
        while b"The agent of host a has connected" not in job.process.stderr.readline():
            self.assertIsNone(job.process.poll())
        job.process.kill()
        job.process.communicate()
        self.assertEqual(agent.wait(10 * SLACK)[0], 0)
        self.assert_empty()

    def has_dialled(self, agent):
        connections = subprocess.run([*WORLD.inside("a"), "ss", "-tnH", "state", "established"],
                                     check=True, capture_output=True, text=True, timeout=10).stdout
        return agent.process.poll() is None and f"10.93.0.1:{PORT}" in connections

    def test_agent_is_killed(self):
        job = self.start_sleepers()
        agent, = [pid for pid in WORLD.processes("a") if b"--dial" in command_line(pid)
                  and b"supervisor" not in read(pid, "comm")]
        os.kill(agent, signal.SIGKILL)
        _, err = self.end(job, expect=69)
        self.assertIn("lost the agent on host a", err)

    def test_network_is_cut(self):
        job = self.start_sleepers("--gloo-timeout-seconds", 2)
        WORLD.set_link("a", "down")
        try:
            _, err = self.end(job, expect=69)
            self.assertIn("host a", err)
        finally:
            WORLD.set_link("a", "up")


class Platform(Dial):
    """Agents as a platform has them: started once, for whatever jobs come, as in a pod."""

    def setUp(self):
        super().setUp()
        for host in HOSTS:
            self.start_agent(host, "--redial", dial=f"10.93.0.1:{PORT}")

    def tearDown(self):
        for agent in self.agents.values():
            self.assertIsNone(agent.process.poll())
            agent.process.terminate()
            self.assertEqual(agent.wait(10 * SLACK)[0], 0)
        self.assert_empty()

    def finish_job(self, job, expect=0):
        code, out, err = job.wait()
        out, err = out.decode(), err.decode()
        self.assertEqual(code, expect, f"{out}\n{err}")
        return out, err

    def test_one_job_after_another(self):
        for word in ("first", "second"):
            out, err = self.finish_job(self.launch("-H", "a:2,b:1", "echo", word))
            self.assertEqual(out.count(word), 3)
            self.assertEqual(err, "")
        self.finish_job(self.launch("-H", "a:1,b:1", "sh", "-c", "exit 7"), 7)
        self.finish_job(self.launch("-H", "a:1,b:1", "true"))

    def test_the_launcher_has_ranks_too(self):
        """Under the name that is its own."""
        job = Job("--await-agents", PORT, "--secret-file", self.secret, "-H",
                  "job-master:1,a:1,b:1", "sh", "-c", "echo $HOROVOD_RANK on $HOROVOD_HOSTNAME",
                  before=[*WORLD.inside("launcher"), "unshare", "--uts", "sh", "-c",
                          "hostname job-master; exec \"$@\"", "sh"])
        self.addCleanup(job.kill)
        out, _ = self.finish_job(job)
        self.assertEqual(sorted(out.splitlines()), ["[0]<stdout>:0 on job-master",
                                                    "[1]<stdout>:1 on a", "[2]<stdout>:2 on b"])

    def test_who_is_missing_is_named(self):
        _, err = self.finish_job(
            self.launch("-H", "a:1,c:1,d:1,b:1", "--start-timeout", 3, "true"), 75)
        self.assertIn("host c did not answer within 3 s (--start-timeout)", err)
        self.assertIn("Nor did d\n", err)

    def test_the_secret_of_a_mounted_volume(self):
        """A link to a file that a group may read, as Kubernetes mounts it."""
        data = self.place / "..data"
        data.mkdir()
        (data / "secret").write_text(self.secret.read_text())
        (data / "secret").chmod(0o440)
        (self.place / "mounted").symlink_to("..data/secret")
        job = Job("--await-agents", PORT, "--secret-file", self.place / "mounted", "-H", "a:1",
                  "echo", "here", before=WORLD.inside("launcher"))
        self.addCleanup(job.kill)
        self.assertEqual(self.finish_job(job)[0], "[0]<stdout>:here\n")

    # --- Another launcher ---

    def write_mpirun(self, text):
        """A stand-in that starts something on every host, as it would by ssh."""
        (self.place / "bin").mkdir()
        mpirun = self.place / "bin/mpirun"
        mpirun.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exec echo 'Open MPI'\n" + text)
        mpirun.chmod(0o755)
        return {"PATH": f"{mpirun.parent}:{os.environ['PATH']}"}

    def test_mpirun(self):
        env = self.write_mpirun(
            "for host in a b; do $OMPI_MCA_plm_rsh_agent -x $host \"echo daemon of $host\" & done; "
            "wait; echo \"$@\"; exit 6\n")
        out, err = self.finish_job(self.launch("--mpi", "-H", "a:1,b:1", "train", env=env), 6)
        for line in ("daemon of a\n", "daemon of b\n", "-H a:1,b:1 "):
            self.assertIn(line, out)
        self.assertEqual(err, "")
        self.finish_job(self.launch("-H", "a:1,b:1", "true"))

    def test_mpirun_waits_for_all_agents(self):
        env = self.write_mpirun("echo started\n")
        out, err = self.finish_job(self.launch("--mpi", "-H", "a:1,c:1", "--start-timeout", 3,
                                               "train", env=env), 75)
        self.assertIn("host c did not answer within 3 s", err)
        self.assertEqual(out, "")

    def test_mpirun_that_loses_a_host(self):
        """It is told after a while, if it has not noticed."""
        env = self.write_mpirun("$OMPI_MCA_plm_rsh_agent a 'echo up; sleep 1000' &\n"
                                "trap 'exit 143' TERM; wait; sleep 1000 & wait\n")
        job = self.launch("--mpi", "-H", "a:1,b:1", "train", env=env)
        self.assertEqual(job.process.stdout.readline(), b"up\n")
        self.agents.pop("b").kill()
        _, err = self.finish_job(job, 69)
        self.assertIn("lost the agent on host b", err)

    @unittest.skipIf(shutil.which("mpirun") is None, "no mpirun")
    def test_a_real_mpirun(self):
        out, _ = self.finish_job(self.launch("--mpi", "-H", "a:1,b:1", HVD_INFO, "--transports"))
        for rank in range(2):
            self.assertIn(f"transports of rank {rank} of 2", out)

    def start_carrier(self):
        carrier = self.launch("--carry-commands", "--start-timeout", 4)
        self.addCleanup(carrier.process.communicate)
        return carrier

    def shell(self, *words):
        return Job("--shell", "--dial", f"127.0.0.1:{PORT}", "--secret-file", self.secret, "--",
                   *words, before=WORLD.inside("launcher"))

    def test_commands_of_another_launcher(self):
        """One after the other on the same host, as mpirun's daemons."""
        carrier = self.start_carrier()
        for _ in range(2):
            shells = [self.shell("-x", host, "echo", f"of {host};", "exit", number)
                      for number, host in enumerate(HOSTS, 3)]
            for number, (host, shell) in enumerate(zip(HOSTS, shells), 3):
                self.assertEqual(self.finish_job(shell, number)[0], f"of {host}\n")
        carrier.process.terminate()
        self.finish_job(carrier, 143)

    def test_a_command_for_a_host_without_agent(self):
        carrier = self.start_carrier()
        _, err = self.finish_job(self.shell("c", "true"), 69)
        self.assertIn("no agent of host c is free within 4 s (--start-timeout)", err)
        carrier.process.terminate()
        self.finish_job(carrier, 143)

    def test_a_command_ends_with_its_shell(self):
        carrier = self.start_carrier()
        shell = self.shell("a", "echo started; exec sleep 1000")
        self.assertEqual(shell.process.stdout.readline(), b"started\n")
        sleepers = [pid for pid in WORLD.processes("a") if b"sleep" in command_line(pid)]
        self.assertEqual(len(sleepers), 1)
        shell.process.kill()
        shell.process.communicate()
        self.assertTrue(eventually(lambda: not command_line(sleepers[0]), 5 * SLACK))
        self.assertEqual(self.finish_job(self.shell("a", "echo", "again"))[0], "again\n")
        carrier.process.terminate()
        self.finish_job(carrier, 143)


class Elastic(Dial):
    def test_a_host_fails_and_comes_back(self):
        hosts = self.place / "hosts.sh"
        hosts.write_text("#!/bin/sh\necho a:1\necho b:1\n")
        hosts.chmod(0o755)
        for host in HOSTS:
            self.start_agent(host)
        with open(self.place / "out", "wb") as out:
            job = self.launch("-np", 2, "--min-np", 1, "--host-discovery-script", hosts,
                              "--blacklist-cooldown-range", 1, 2, sys.executable,
                              ROOT / "tests/launch/elastic_rank.py", self.place,
                              env={"PYTHONPATH": str(BUILD / "python")}, stdout=out, stderr=out)
        n_lines = self.await_size(2)
        (self.place / "die.b").touch()
        n_lines = self.await_size(1, n_lines)
        self.assertEqual(self.agents["b"].wait()[0], 0)
        self.start_agent("b")  # as its platform does
        self.await_size(2, n_lines)
        (self.place / "over").touch()
        self.assertEqual(job.process.wait(60), 0, self.lines())
        self.finish(job, 5)
        self.assert_empty()

    def test_hosts_are_there_when_their_agents_are(self):
        """The list names hosts that may come; who fails comes back by himself."""
        self.start_agent("a", "--redial", dial=f"10.93.0.1:{PORT}")
        with open(self.place / "out", "wb") as out:
            job = self.launch("-np", 1, "--min-np", 1, "-H", "a:1,b:1",
                              "--elastic-restarts", 0, "--blacklist-cooldown-range", 1, 2,
                              sys.executable, ROOT / "tests/launch/elastic_rank.py", self.place,
                              env={"PYTHONPATH": str(BUILD / "python")}, stdout=out, stderr=out)
        n_lines = self.await_size(1)
        self.start_agent("b", "--redial", dial=f"10.93.0.1:{PORT}")
        n_lines = self.await_size(2, n_lines)
        (self.place / "die.b").touch()
        n_lines = self.await_size(1, n_lines)
        self.await_size(2, n_lines)
        (self.place / "over").touch()
        self.assertEqual(job.process.wait(60), 0, self.lines())
        for agent in self.agents.values():
            agent.process.terminate()
            self.assertEqual(agent.wait(10 * SLACK)[0], 0)
        self.assert_empty()

    def test_pod_is_drained(self):
        """It is told in advance: its rank leaves at the end of a step, and a new pod comes."""
        for host in HOSTS:
            self.start_agent(host, "--redial", dial=f"10.93.0.1:{PORT}")
        with open(self.place / "out", "wb") as out:
            job = self.launch("-np", 2, "--min-np", 1, "-H", "a:1,b:1", sys.executable,
                              ROOT / "tests/launch/elastic_rank.py", self.place,
                              env={"PYTHONPATH": str(BUILD / "python")}, stdout=out, stderr=out)
        n_lines = self.await_size(2)
        self.agents["b"].process.terminate()
        n_lines = self.await_size(1, n_lines)
        self.assertEqual(self.agents["b"].wait(10 * SLACK)[0], 0)
        self.start_agent("b", "--redial", dial=f"10.93.0.1:{PORT}")
        self.await_size(2, n_lines)
        (self.place / "over").touch()
        self.assertEqual(job.process.wait(60), 0, self.lines())
        numbers = [int(line.split()[1]) for line in self.lines() if line.endswith(" on a")]
        self.assertEqual(numbers, list(range(1, len(numbers) + 1)))
        self.agents["a"].process.terminate()
        self.assertEqual(self.agents["a"].wait(10 * SLACK)[0], 0)
        self.agents["b"].process.terminate()
        self.assertEqual(self.agents["b"].wait(10 * SLACK)[0], 0)
        self.assert_empty()

    def test_too_few_agents(self):
        self.start_agent("a", dial=f"10.93.0.1:{PORT}")
        job = self.launch("-np", 2, "--min-np", 1, "-H", "a:1,b:1", "--elastic-timeout", 3, "true")
        _, err = self.end(job, expect=75)
        self.assertIn("the job needs 2 slots but has 1 after --elastic-timeout; no agent has "
                      "connected for b", err)

    def lines(self):
        return (self.place / "out").read_text().splitlines()

    def await_size(self, size, after=0):
        """Waits for a step of that many ranks behind these lines; how many lines there are."""
        def is_there():
            return any(f" of {size} on " in line for line in self.lines()[after:])

        self.assertTrue(eventually(is_there, 60), self.lines())
        return len(self.lines())


if __name__ == "__main__":
    main()
