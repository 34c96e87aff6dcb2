#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Elastic jobs of horovodrun: ranks that fail, hosts that come and go.

Hosts are names that a stand-in for ssh takes for this machine. The ranks count steps together
(elastic_rank.py); what they print tells the test who is there and that no step is lost.

Usage: test_elastic.py BUILD-DIRECTORY [unittest arguments]
"""
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from launching import (BUILD, HOROVODRUN, ROOT, SLACK, Case, Job, clean_environment, command_line,
                       eventually, main, read, run, variable)

PATIENCE_S = 20 * SLACK
HEARTBEAT_S = 10  # HOROVOD_HEARTBEAT_TIMEOUT_SECONDS
RANK = [sys.executable, ROOT / "tests/launch/elastic_rank.py"]
STEP = re.compile(r"step (\d+) rank (\d+) of (\d+) on (\S+)")


class Counting:
    """A running job, and every line it has printed so far."""

    def __init__(self, *words, env):
        self.job = Job(*words, env=env)
        self.lines = []
        self.readers = [threading.Thread(target=self._read, args=(stream,), daemon=True)
                        for stream in (self.job.process.stdout, self.job.process.stderr)]
        for reader in self.readers:
            reader.start()

    def _read(self, stream):
        for line in stream:
            self.lines.append(line.decode().rstrip("\n"))
        stream.close()

    def text(self):
        return "\n".join(self.lines)

    def steps(self):
        """(step, rank, size, host) of every line, in order."""
        found = [STEP.search(line) for line in list(self.lines)]
        return [(int(m[1]), int(m[2]), int(m[3]), m[4]) for m in found if m]

    def wait(self):
        code = self.job.process.wait(PATIENCE_S)
        for reader in self.readers:
            reader.join(PATIENCE_S)
        return code


class Elastic(Case):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.place = pathlib.Path(directory.name)
        # Called as ssh would be: options, a host, a command. Nobody is at home on "bad".
        self.fake = self.write("fake", "#!/bin/sh\ncase \"$*\" in *bad.invalid*) echo No route to "
                               f"host >&2; exit 255;; esac\nexec {HOROVODRUN} --agent\n")
        self.environment = {"PYTHONPATH": str(BUILD / "python")}

    def write(self, name, text):
        path = self.place / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def discover(self, *hosts):
        """The hosts there are from now on."""
        draft = self.write("hosts.new", "".join(f"{host}\n" for host in hosts))
        draft.rename(self.place / "hosts")
        return self.write("discover", f"#!/bin/sh\ncat {self.place}/hosts\n")

    def start(self, *words):
        counting = Counting("--ssh-command", self.fake, "--ssh-attempts", 1, *words, *RANK,
                            self.place, env=self.environment)
        self.addCleanup(counting.job.kill)
        return counting

    def await_size(self, counting, size, after=0):
        """Waits for a step of that many ranks after the first `after`; how many there are."""
        def is_there():
            return any(step[2] == size for step in counting.steps()[after:])

        if not eventually(is_there, PATIENCE_S):
            self.fail(f"never {size} ranks:\n{counting.text()}")
        return len(counting.steps())

    def kill_rank(self, host):
        (self.place / f"die.{host}").touch()

    def finish_well(self, counting):
        (self.place / "over").touch()
        self.assertEqual(counting.wait(), 0, counting.text())
        self.assertIn("done rank 0", counting.text())
        self.finish_all(counting)

    def finish_all(self, counting):
        self.assertEqual(counting.job.left_behind(10), [])

    def assert_no_step_lost(self, counting):
        """On every rank that stays, numbers go up; a failed step may come again."""
        last = {}
        for step, _, _, host in counting.steps():
            self.assertGreaterEqual(step, last.get(host, step))
            last[host] = step


class Restarting(Elastic):
    """A rank that failed is started again on its host; one host is enough."""

    def start_on_one_host(self, *words):
        return self.start("-np", 3, "--min-np", 1, *words, "-H", "a.invalid:3")

    def await_failure(self, counting, number):
        """Kills a rank, and waits until the launcher has said so."""
        self.kill_rank("a.invalid")
        if not eventually(lambda: counting.text().count("failed; ") == number, PATIENCE_S):
            self.fail(f"no failure {number}:\n{counting.text()}")
        return len(counting.steps())

    def test_on_one_host(self):
        counting = self.start_on_one_host()
        self.await_size(counting, 3)
        seen = self.await_failure(counting, 1)
        self.await_size(counting, 3, seen)
        self.finish_well(counting)
        self.assertIn("starting it again on host a.invalid (1 of --elastic-restarts 3), continuing "
                      "with 2 ranks", counting.text())
        numbers = [step for step, *_ in counting.steps()[seen:]]
        self.assertGreater(min(numbers), 1)  # nobody began at the beginning

    def test_second_failure_is_waited_for(self):
        counting = self.start_on_one_host()
        self.await_size(counting, 3)
        seen = self.await_failure(counting, 1)
        self.await_size(counting, 3, seen)
        seen = self.await_failure(counting, 2)
        seen = self.await_size(counting, 2, seen)  # the others go on meanwhile
        self.await_size(counting, 3, seen)
        self.finish_well(counting)

    def test_too_often(self):
        counting = self.start_on_one_host("--elastic-restarts", 1)
        self.await_size(counting, 3)
        seen = self.await_failure(counting, 1)
        self.await_size(counting, 3, seen)
        seen = self.await_failure(counting, 2)
        self.await_size(counting, 2, seen)
        self.finish_well(counting)
        self.assertIn("had more failures than --elastic-restarts 1", counting.text())
        self.assertEqual(counting.steps()[-1][2], 2)

    def test_too_few_are_left(self):
        counting = self.start("-np", 2, "--min-np", 2, "--elastic-restarts", 1, "-H", "a.invalid:2")
        self.await_size(counting, 2)
        seen = self.await_failure(counting, 1)
        self.await_size(counting, 2, seen)
        self.kill_rank("a.invalid")
        self.assertEqual(counting.wait(), 75, counting.text())
        self.assertIn("the job needs 2 slots but has 1, and no more are expected", counting.text())
        self.finish_all(counting)


class Failing(Elastic):
    """Hosts are excluded at once, as they are without restarts."""

    def test_others_go_on(self):
        counting = self.start("--verbose", "--elastic-restarts", 0, "-np", 3, "--min-np", 2, "-H",
                              "a.invalid:1,b.invalid:1,c.invalid:1")
        seen = self.await_size(counting, 3)
        self.kill_rank("b.invalid")
        self.await_size(counting, 2, seen)
        self.finish_well(counting)
        self.assert_no_step_lost(counting)
        self.assertIn("Process 1 exit with status code 3.", counting.text())
        self.assertIn("excluding host b.invalid", counting.text())
        self.assertEqual({host for *_, size, host in counting.steps() if size == 2},
                         {"a.invalid", "c.invalid"})

    def test_rank_0_fails(self):
        counting = self.start("--elastic-restarts", 0, "-np", 2, "--min-np",
                              1, "-H", "a.invalid:1,b.invalid:1")
        seen = self.await_size(counting, 2)
        self.kill_rank("a.invalid")
        self.await_size(counting, 1, seen)
        self.finish_well(counting)
        self.assert_no_step_lost(counting)
        first_alone = next(step for step in counting.steps() if step[2] == 1)
        self.assertEqual(first_alone[1:], (0, 1, "b.invalid"))
        self.assertGreater(first_alone[0], 1)  # with the state of the job

    def test_all_fail(self):
        counting = Counting("--ssh-command", self.fake, "-np", 2, "--min-np", 1, "-H",
                            "a.invalid:1,b.invalid:1", sys.executable, "-c",
                            "raise ValueError('broken on purpose')", env=self.environment)
        self.addCleanup(counting.job.kill)
        self.assertEqual(counting.wait(), 1)
        self.assertIn("ValueError: broken on purpose", counting.text())
        self.assertIn("the job failed because of rank", counting.text())
        self.finish_all(counting)

    def test_too_few_are_left(self):
        counting = self.start("--elastic-restarts", 0, "-np", 2, "--min-np",
                              2, "-H", "a.invalid:1,b.invalid:1")
        self.await_size(counting, 2)
        self.kill_rank("b.invalid")
        self.assertEqual(counting.wait(), 75, counting.text())
        self.assertIn("the job needs 2 slots but has 1, and no more are expected", counting.text())
        self.assertIn("--min-np", counting.text())
        self.finish_all(counting)

    def test_host_comes_back_after_its_cooldown(self):
        counting = self.start("--elastic-restarts", 0, "-np", 2, "--min-np", 1,
                              "--blacklist-cooldown-range", 1, 2, "-H",
                              "a.invalid:1,b.invalid:1")
        seen = self.await_size(counting, 2)
        self.kill_rank("b.invalid")
        seen = self.await_size(counting, 1, seen)
        self.await_size(counting, 2, seen)
        self.finish_well(counting)

    def test_reset_limit(self):
        counting = self.start("--elastic-restarts", 0, "-np", 3, "--min-np", 1, "--reset-limit", 1,
                              "-H",
                              "a.invalid:1,b.invalid:1,c.invalid:1")
        seen = self.await_size(counting, 3)
        self.kill_rank("b.invalid")
        self.await_size(counting, 2, seen)
        self.kill_rank("c.invalid")
        self.assertEqual(counting.wait(), 1, counting.text())
        self.assertIn("number of resets during elastic job exceeded limit: 1", counting.text())
        self.finish_all(counting)

    def test_killed_launcher_takes_everything_along(self):
        counting = self.start("--elastic-restarts", 0, "-np", 2, "--min-np",
                              1, "-H", "a.invalid:1,b.invalid:1")
        self.await_size(counting, 2)
        counting.job.process.kill()
        self.finish_all(counting)
        counting.wait()


class Unheard(Elastic):
    """Ranks that stay, but are not heard any more."""

    def rank_on(self, counting, host):
        pid, = [pid for pid in counting.job.survivors()
                if variable(pid, "HOROVOD_HOSTNAME") == host and b"elastic_rank" in
                command_line(pid)]
        return pid

    def stop_and_go_on(self, counting, host, size):
        """Stops a rank; the job goes on without it, and soon."""
        seen = self.await_size(counting, size)
        os.kill(self.rank_on(counting, host), signal.SIGSTOP)
        begun = time.monotonic()
        self.await_size(counting, size - 1, seen)
        elapsed = time.monotonic() - begun
        self.finish_well(counting)
        self.assert_no_step_lost(counting)
        self.assertLess(elapsed, HEARTBEAT_S + 5 * SLACK)
        print(f"{elapsed:.1f} s", end=" ", file=sys.stderr)

    def test_stopped_rank(self):
        self.stop_and_go_on(self.start("-np", 3, "--min-np", 2, "--elastic-restarts", 0, "-H",
                                       "a.invalid:1,b.invalid:1,c.invalid:1"), "b.invalid", 3)

    def test_stopped_rank_0(self):
        self.stop_and_go_on(self.start("-np", 2, "--min-np", 1, "--elastic-restarts", 0, "-H",
                                       "a.invalid:1,b.invalid:1"), "a.invalid", 2)

    def test_stopped_rank_of_one_host(self):
        """It is ended and started again; the others of its host stay."""
        counting = self.start("-np", 3, "--min-np", 2, "-H", "a.invalid:3")
        seen = self.await_size(counting, 3)
        victim = next(pid for pid in counting.job.survivors()
                      if variable(pid, "HOROVOD_RANK") == "1" and b"elastic_rank" in
                      command_line(pid))
        os.kill(victim, signal.SIGSTOP)
        self.assertTrue(eventually(lambda: "generation 2 of the job has" in counting.text(),
                                   HEARTBEAT_S + 5 * SLACK), counting.text())
        self.await_size(counting, 3, seen)
        self.finish_well(counting)
        self.assertNotIn("excluding host", counting.text())

    def test_generation_that_does_not_meet(self):
        """One is stopped just when the others are about to meet it in the next generation."""
        counting = self.start("-np", 3, "--min-np", 1, "--start-timeout", 5,
                              "--elastic-restarts", 0, "-H", "a.invalid:1,b.invalid:1,c.invalid:1")
        seen = self.await_size(counting, 3)
        os.kill(self.rank_on(counting, "c.invalid"), signal.SIGSTOP)
        os.kill(self.rank_on(counting, "b.invalid"), signal.SIGKILL)
        begun = time.monotonic()
        self.await_size(counting, 1, seen)
        elapsed = time.monotonic() - begun
        self.finish_well(counting)
        self.assertLess(elapsed, 5 + 3 * SLACK)
        print(f"{elapsed:.1f} s", end=" ", file=sys.stderr)


class Warned(Elastic):
    """Somebody sends SIGTERM in advance: nothing of what was done is lost."""

    def agent_of(self, counting, host):
        """The process that has started the ranks of that host."""
        rank = next(pid for pid in counting.job.survivors()
                    if variable(pid, "HOROVOD_HOSTNAME") == host and b"elastic_rank" in
                    command_line(pid))
        return int(read(rank, "stat").rsplit(b")", 1)[1].split()[1])

    def assert_every_step_once(self, counting):
        """On the host that stays; a step that failed would have come twice."""
        numbers = [step for step, _, _, host in counting.steps() if host == "a.invalid"]
        self.assertEqual(numbers, list(range(1, len(numbers) + 1)))

    def test_host_is_about_to_go(self):
        counting = self.start("-np", 3, "--min-np", 1, "-H", "a.invalid:1,b.invalid:2")
        seen = self.await_size(counting, 3)
        os.kill(self.agent_of(counting, "b.invalid"), signal.SIGTERM)
        self.await_size(counting, 1, seen)
        self.finish_well(counting)
        self.assert_every_step_once(counting)
        self.assertIn("host b.invalid is about to go", counting.text())
        self.assertNotIn("failed", counting.text())

    def test_host_of_rank_0_is_about_to_go(self):
        counting = self.start("-np", 2, "--min-np", 1, "-H", "b.invalid:1,a.invalid:1")
        seen = self.await_size(counting, 2)
        os.kill(self.agent_of(counting, "b.invalid"), signal.SIGTERM)
        self.await_size(counting, 1, seen)
        self.finish_well(counting)
        self.assert_every_step_once(counting)

    def test_port_of_agents_is_about_to_go(self):
        """The server of --serve-agents passes the signal on, and ends after its agents."""
        secret = self.write("secret", os.urandom(32).hex())
        secret.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = ["--agent-port", str(free.getsockname()[1]), "--secret-file", str(secret)]
        server = subprocess.Popen([HOROVODRUN, "--serve-agents", *port], env=clean_environment())
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        self.write("fake", f"#!/bin/sh\ncase \"$*\" in *b.invalid*) exec {HOROVODRUN} --dial-agent "
                   f"127.0.0.1 {' '.join(port)};; esac\nexec {HOROVODRUN} --agent\n")
        counting = self.start("-np", 2, "--min-np", 1, "--ssh-attempts", 10, "-H",
                              "a.invalid:1,b.invalid:1")
        seen = self.await_size(counting, 2)
        server.terminate()
        self.await_size(counting, 1, seen)
        self.assertEqual(server.wait(PATIENCE_S), 0)
        self.finish_well(counting)
        self.assert_every_step_once(counting)

    def test_nobody_else_has_the_state(self):
        counting = self.start("-np", 2, "--min-np", 1, "-H", "b.invalid:2")
        self.await_size(counting, 2)
        os.kill(self.agent_of(counting, "b.invalid"), signal.SIGTERM)
        self.assertEqual(counting.wait(), 128 + signal.SIGTERM, counting.text())
        self.assertIn("no other host has the state of the job", counting.text())
        self.finish_all(counting)

    def test_asked_twice(self):
        """Then it does not wait for the end of a step."""
        counting = self.start("-np", 2, "--min-np", 1, "--elastic-restarts", 0, "-H",
                              "a.invalid:1,b.invalid:1")
        seen = self.await_size(counting, 2)
        agent = self.agent_of(counting, "b.invalid")
        for pid in counting.job.survivors():  # its rank will not come to the end of a step
            if variable(pid, "HOROVOD_HOSTNAME") == "b.invalid":
                os.kill(pid, signal.SIGSTOP)
        os.kill(agent, signal.SIGTERM)
        self.assertTrue(eventually(lambda: "about to go" in counting.text(), PATIENCE_S))
        os.kill(agent, signal.SIGTERM)
        self.await_size(counting, 1, seen)
        self.finish_well(counting)

    def start_with_checkpoints(self, *words):
        counting = Counting("--ssh-command", self.fake, "-np", 2, "--min-np", 1, *words,
                            ROOT / ".venv/bin/python", *RANK[1:], self.place,  # it has NumPy
                            self.place / "checkpoints", env=self.environment)
        self.addCleanup(counting.job.kill)
        return counting

    def assert_goes_on_after(self, counting, *words):
        self.assertEqual(counting.wait(), 128 + signal.SIGTERM, counting.text())
        self.finish_all(counting)
        last = max(step for step, *_ in counting.steps())
        again = self.start_with_checkpoints(*words)
        self.await_size(again, 2)
        self.finish_well(again)
        self.assertEqual(min(step for step, *_ in again.steps()), last + 1, again.text())

    def test_job_is_about_to_end(self):
        counting = self.start_with_checkpoints("-H", "a.invalid:1,b.invalid:1")
        self.await_size(counting, 2)
        counting.job.process.terminate()
        self.assert_goes_on_after(counting, "-H", "a.invalid:1,b.invalid:1")
        self.assertIn("the ranks write a checkpoint at the end of their step", counting.text())

    def test_only_host_is_about_to_go(self):
        counting = self.start_with_checkpoints("-H", "b.invalid:2")
        self.await_size(counting, 2)
        os.kill(self.agent_of(counting, "b.invalid"), signal.SIGTERM)
        self.assert_goes_on_after(counting, "-H", "b.invalid:2")

    def test_no_time_to_hand_over(self):
        counting = self.start_with_checkpoints("-H", "a.invalid:2", "--handover-timeout", 0)
        self.await_size(counting, 2)
        counting.job.process.terminate()
        self.assertEqual(counting.wait(), 128 + signal.SIGTERM, counting.text())
        self.assertNotIn("write a checkpoint", counting.text())
        self.finish_all(counting)


class Discovering(Elastic):
    def test_hosts_come_and_go(self):
        script = self.discover("a.invalid:1")
        counting = self.start("-np", 1, "--max-np", 3, "--host-discovery-script", script)
        seen = self.await_size(counting, 1)
        self.discover("a.invalid:1", "b.invalid:2", "bad.invalid:1")
        seen = self.await_size(counting, 3, seen)

        def first_new():
            return next((step for step in counting.steps() if step[3] == "b.invalid"), None)

        self.assertTrue(eventually(first_new, PATIENCE_S))  # its lines may come after those of a
        self.assertGreater(first_new()[0], 1)  # new ranks get the state
        self.discover("b.invalid:2")  # the first host goes, and rank 0 with it
        self.await_size(counting, 2, seen)
        self.finish_well(counting)
        self.assert_no_step_lost(counting)
        self.assertNotIn("exit with status code", counting.text())

    def test_slots_of_hosts_without_a_number(self):
        script = self.discover("a.invalid")
        counting = self.start("-np", 2, "--slots-per-host", 2, "--host-discovery-script", script)
        self.await_size(counting, 2)
        self.finish_well(counting)

    def test_waits_for_hosts(self):
        script = self.discover()
        counting = self.start("-np", 1, "--host-discovery-script", script)
        self.assertFalse(eventually(lambda: counting.steps(), 2))
        self.discover("a.invalid:1")
        self.await_size(counting, 1)
        self.finish_well(counting)

    def test_hosts_that_never_come(self):
        script = self.discover("a.invalid:1")
        counting = self.start("-np", 2, "--elastic-timeout", 2, "--host-discovery-script", script)
        self.assertEqual(counting.wait(), 75, counting.text())
        self.assertIn("the job needs 2 slots but has 1 after --elastic-timeout",
                      counting.text())

    def test_script_that_fails(self):
        script = self.write("broken", "#!/bin/sh\nexit 7\n")
        _, err = run("-np", 1, "--host-discovery-script", script, "true", expect=2)
        self.assertIn(f"Failed to execute discovery script: {script}. Exit code: 7", err)


class Words(Elastic):
    def test_wrong_command_lines(self):
        for words, part in [(["-np", 2, "--min-np", 1, "--elastic-restarts", 0], "at least two"),
                            (["-np", 2, "--min-np", 3, "-H", "a:1,b:1"], "must be between"),
                            (["-np", 2, "--max-np", 1, "-H", "a:1,b:1"], "must be between"),
                            (["--min-np", 1, "-H", "a:1,b:1"], "-np"),
                            (["--mpi", "-np", 1, "--min-np", 1, "-H", "a:1,b:1"], "--mpi"),
                            (["-np", 2, "--min-np", 1, "--blacklist-cooldown-range", 5, 2, "-H",
                              "a:1,b:1"], "the smaller first")]:
            with self.subTest(words=words):
                _, err = run(*words, "x", expect=2)
                self.assertIn(part, err)
                self.assertEqual(err.count("\n"), 1)


if __name__ == "__main__":
    main()
