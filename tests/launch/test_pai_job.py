#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The scene of an OpenPAI job: `horovodrun --pai` and `--pai-worker` in containers.

Network namespaces play containers. Each has the variables OpenPAI gives it, an sshd of its own once
it has started, and a host name that nobody can look up; tasks are known by aliases that only ssh's
configuration has.

Usage: test_pai_job.py BUILD-DIRECTORY [unittest arguments]     (as root)
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from launching import (BUILD, HVD_INFO, MARK, ROOT, SLACK, Case, Job, eventually, main,
                       variable)
from world import PORT, World

# Task to interface: machines may have other names for theirs.
TASKS = {"master-0": ("eth7", ""), "worker-0": ("eth7", ""), "worker-1": ("ib0", "")}
AGENT_PORT = 23017
SOCKETS = pathlib.Path(f"/tmp/horovod-pai-{os.getuid()}")
WORLD = None


class Scene(World):
    """A World whose hosts are containers: nothing runs in them until they start."""

    def _make(self):
        self.running = {}
        super()._make()
        for task in TASKS:
            names = pathlib.Path("/etc/netns") / self.space(task)
            (names / "hosts").write_text("127.0.0.1 localhost\n")
            (names / "resolv.conf").write_text("")
            (names / "ssh").mkdir()
            (names / "ssh/ssh_config").write_text(self.config().read_text())
            (self.directory / f"sockets-{task}").mkdir(mode=0o700)
        SOCKETS.mkdir(mode=0o700, exist_ok=True)

    def _start_sshd(self, host):
        pass

    def container(self, task):
        """Words that run a command in the container of a task, under a name of its own, with
        sockets that only this container sees."""
        return [*self.inside(task), "unshare", "--uts", "--mount", "sh", "-c",
                f"hostname machine-of-{task}; mount --bind {self.directory}/sockets-{task} "
                f"{SOCKETS}; exec \"$@\"", "sh"]

    def start_sshd(self, task):
        config = self.config(f"sshd-{task}")
        config.write_text(
            f"Port {PORT}\nHostKey {self.directory / 'server'}\nPidFile none\nUsePAM no\n"
            "StrictModes no\nPermitRootLogin yes\n"
            f"AuthorizedKeysFile {self.directory / 'authorized'}\n")
        server = subprocess.Popen([*self.container(task), "/usr/sbin/sshd", "-D", "-e", "-f",
                                   config], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        self.running.setdefault(task, []).append(server)

    def kill(self, task):
        """The container is gone, with everything in it."""
        def processes():
            output = subprocess.run(["ip", "netns", "pids", self.space(task)], check=True,
                                    capture_output=True, text=True).stdout
            return [int(pid) for pid in output.split()]
        while processes():
            for pid in processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            for process in self.running.pop(task, []):
                process.wait()
            time.sleep(0.05)


def setUpModule():
    global WORLD
    WORLD = Scene(TASKS)


def tearDownModule():
    for task in TASKS:
        WORLD.kill(task)
    WORLD.close()


def variables(task, n_workers, gpus=0):
    """What OpenPAI tells the container of a task."""
    role, index = task.split("-")
    told = {"PAI_JOB_NAME": "alice~horovod-job", "PAI_TASK_ROLE_LIST": "worker,master",
            "PAI_TASK_ROLE_TASK_COUNT_master": "1",
            "PAI_TASK_ROLE_TASK_COUNT_worker": str(n_workers),
            "PAI_CURRENT_TASK_ROLE_NAME": role,
            "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": index}
    for number, name in enumerate(TASKS, 2):
        place = name.replace("-", "_")
        told[f"PAI_HOST_IP_{place}"] = f"10.93.0.{number}"
        told[f"PAI_PORT_LIST_{place}_ssh"] = str(PORT)
        told[f"PAI_PORT_LIST_{place}_horovod"] = f"{AGENT_PORT},{AGENT_PORT + 1}"
        told[f"PAI_RESOURCE_{name.split('-')[0]}"] = f"{gpus},2,1024,64"
    return told


class Containers(Case):
    def tearDown(self):
        for task in TASKS:
            WORLD.kill(task)

    def start(self, task, *words, n_workers=1, has_sshd=True, gpus=0, env=None):
        """A container with its command."""
        if has_sshd:
            WORLD.start_sshd(task)
        job = Job(*words, before=WORLD.container(task),
                  env={**variables(task, n_workers, gpus), **(env or {})})
        WORLD.running.setdefault(task, []).append(job.process)
        self.addCleanup(job.process.stdout.close)
        self.addCleanup(job.process.stderr.close)
        return job

    def start_worker(self, index=0, *words, **options):
        return self.start(f"worker-{index}", *words, "--pai-worker", **options)

    def start_master(self, *words, **options):
        return self.start("master-0", "--pai", *words, **options)

    def end(self, job, expect, timeout=90):
        code, out, err = job.wait(timeout)
        out, err = out.decode(), err.decode()
        self.assertEqual(code, expect, f"{out}\n{err}")
        return out, err

    def wait_until_said(self, job, part):
        """Reads its stderr until the part comes; what has been read."""
        said = ""
        while part not in said:
            line = job.process.stderr.readline().decode()
            self.assertTrue(line, f"ended without {part!r}: {said}")
            said += line
        return said

    def assert_trains(self, master, worker, n_ranks=2):
        out, err = self.end(master, 0)
        for rank in range(n_ranks):
            self.assertIn(f"transports of rank {rank} of {n_ranks}", out)
        self.assertRegex(out, rf"from rank 0 to rank {n_ranks - 1} +tcp")
        _, said = self.end(worker, 0)
        self.assertIn("the master ended with exit code 0", said)
        return out, err

    def start_training(self, *words, **options):
        """Master and worker, both ranks running."""
        worker = self.start_worker(**options)
        master = self.start_master(*words, "sh", "-c", "echo ready; sleep 1000 & wait", **options)
        for _ in range(2):
            self.assertIn(b"ready", master.process.stdout.readline())
        return master, worker


class Starting(Containers):
    def test_worker_before_master(self):
        worker = self.start_worker()
        time.sleep(2)
        self.assert_trains(self.start_master(HVD_INFO, "--transports"), worker)

    def test_master_before_worker(self):
        master = self.start_master(HVD_INFO, "--transports")
        self.wait_until_said(master, "missing: worker-0 at 10.93.0.3 (")
        _, err = self.assert_trains(master, self.start_worker())
        self.assertIn("all 2 tasks are ready", err)

    def test_worker_thirty_seconds_late(self):
        master = self.start_master(HVD_INFO, "--transports")
        time.sleep(30)
        _, err = self.assert_trains(master, self.start_worker())
        self.assertRegex(err, r"1 of 2 tasks are ready after [12]\d s of 1800")

    def test_command_of_the_worker_late(self):
        WORLD.start_sshd("worker-0")
        master = self.start_master("sh", "-c", "sleep 12")
        self.wait_until_said(master, "all 2 tasks are ready")
        worker = self.start_worker(has_sshd=False)
        self.end(master, 0)
        self.end(worker, 0)

    def test_rank_for_each_gpu(self):
        worker = self.start_worker(gpus=2)
        master = self.start_master(HVD_INFO, "--transports", gpus=2)
        out, _ = self.assert_trains(master, worker, 4)
        self.assertRegex(out, r"\[2\]<stdout>:.*from rank 2 to rank 3 +shm")

    def test_worker_that_sleeps(self):
        WORLD.start_sshd("worker-0")
        master = self.start_master("sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_HOSTNAME")
        out, _ = self.end(master, 0)
        self.assertIn("[0]<stdout>:0 of master-0\n", out)  # rank 0 is the master's
        self.assertIn("[1]<stdout>:1 of worker-0\n", out)

    def test_its_page_is_on_the_master(self):
        self.start_worker()
        master = self.start_master("--dashboard", "sh", "-c", "sleep 100 & wait")
        said = self.wait_until_said(master, "/?token=")
        port, token = re.search(r"127.0.0.1:(\d+)/\?token=(\w+)", said).groups()

        def asked():
            return subprocess.run(
                [*WORLD.container("master-0"), "curl", "-s", "-H", f"Authorization: Bearer {token}",
                 f"http://127.0.0.1:{port}/metrics"], capture_output=True, text=True).stdout
        self.assertTrue(eventually(lambda: 'hvd_job_ranks 2' in asked(), 60), asked())
        self.assertRegex(asked(), "hvd_job_hosts 2")

    def test_variables_of_a_task_stay_there(self):
        self.start_worker()
        out, _ = self.end(self.start_master(
            "sh", "-c", "echo $HOROVOD_RANK:$PAI_JOB_NAME:$PAI_CURRENT_TASK_ROLE_NAME"), 0)
        self.assertIn("[0]<stdout>:0:alice~horovod-job:master\n", out)
        self.assertIn("[1]<stdout>:1:alice~horovod-job:\n", out)

    def test_interfaces_that_own_the_addresses(self):
        for index in range(2):
            self.start_worker(index, n_workers=2)
        out, _ = self.end(self.start_master("sh", "-c", "echo $HOROVOD_GLOO_IFACE", n_workers=2), 0)
        self.assertIn("[0]<stdout>:eth7,ib0\n", out)

    def run_mpirun(self, n_workers):
        """What a stand-in for Intel MPI's mpirun gets to see, when its sshds have all come."""
        fake = WORLD.directory / "bin"
        fake.mkdir(exist_ok=True)
        (fake / "mpirun").write_text(
            "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Intel(R) MPI Library' || "
            "echo $FI_PROVIDER $I_MPI_HYDRA_IFACE $HOROVOD_GLOO_IFACE \"$@\"\n")
        (fake / "mpirun").chmod(0o755)
        path = os.environ["PATH"]
        master = self.start_master("--mpi", "--azure-rdma", "modern", "true", n_workers=n_workers,
                                   has_sshd=False, env={"PATH": f"{fake}:{path}"})
        workers = [self.start_worker(index, n_workers=n_workers) for index in range(n_workers)]
        self.wait_until_said(master, "missing: master-0 at 10.93.0.2")
        WORLD.start_sshd("master-0")  # mpirun reaches the master's own task by ssh, too
        out, _ = self.end(master, 0)
        for worker in workers:
            self.end(worker, 0)
        return out

    def test_mpirun(self):
        out = self.run_mpirun(1)
        self.assertIn("-hosts master-0,worker-0 ", out)
        self.assertIn("-iface eth7 ", out)
        self.assertRegex(out, "^verbs;ofi_rxm eth7 -l ")

    def test_mpirun_with_other_names_for_interfaces(self):
        out = self.run_mpirun(2)
        self.assertRegex(out, "^verbs;ofi_rxm eth7 eth7,ib0 -l ")
        self.assertNotIn("-iface", out)

    def test_jsrun(self):
        fake = WORLD.directory / "lsf"
        fake.mkdir(exist_ok=True)
        (fake / "jsrun").write_text("#!/bin/sh\ncat $2; shift 2; echo runs: $*; exit 6\n")
        (fake / "jsrun").chmod(0o755)
        worker = self.start_worker()
        out, _ = self.end(self.start_master("--jsrun", "train", "me", env={
            "PATH": f"{fake}:{os.environ['PATH']}"}), 6)
        self.assertRegex(out, r"rank: 0: { hostname: master-0; .*\nrank: 1: { hostname: worker-0;")
        self.assertIn("runs: train me\n", out)
        self.end(worker, 6)


class Elastic(Containers):
    def setUp(self):
        self.folder = WORLD.directory / "elastic"
        self.folder.mkdir()
        self.addCleanup(shutil.rmtree, self.folder)

    def read_until(self, master, part):
        """Reads what ranks print until the part comes."""
        line = " "
        while part not in line:
            line = master.process.stdout.readline().decode()
            if not line:
                self.fail(f"ended without {part!r}: {master.process.stderr.read().decode()}")

    def test_task_is_lost_and_comes_again(self):
        self.start_worker()
        master = self.start_master(
            "--min-np", 1, "--max-np", 2, "--blacklist-cooldown-range", 1, 2,
            sys.executable, ROOT / "tests/launch/elastic_rank.py", self.folder,
            env={"PYTHONPATH": str(BUILD / "python")})
        self.read_until(master, "of 2 on ")
        WORLD.kill("worker-0")
        self.read_until(master, "rank 0 of 1 on ")
        worker = self.start_worker()
        self.read_until(master, "of 2 on worker-0")
        (self.folder / "over").touch()
        _, err = self.end(master, 0)
        self.assertIn("task worker-0 was lost; the job goes on without it", err)
        self.end(worker, 0)

    def test_too_few_are_left(self):
        self.start_worker()
        master = self.start_master(
            "--min-np", 2, "--max-np", 2, "--elastic-timeout", 5, sys.executable,
            ROOT / "tests/launch/elastic_rank.py", self.folder,
            env={"PYTHONPATH": str(BUILD / "python")})
        self.read_until(master, "of 2 on ")
        WORLD.kill("worker-0")
        code, _, err = master.wait(90)
        self.assertNotIn(code, (0, None))
        self.assertIn("task worker-0 was lost; the job goes on without it", err.decode())


class Missing(Containers):
    def test_no_worker_comes(self):
        begin = time.monotonic()
        _, err = self.end(self.start_master("--pai-timeout", 4, "true", n_workers=2), 75)
        self.assertLess(time.monotonic() - begin, 5 * SLACK)
        self.assertIn("2 of 3 tasks did not answer within 4 s (--pai-timeout)", err)
        self.assertIn("worker-0 at 10.93.0.3 (nothing listens on its ssh port)", err)
        self.assertIn("worker-1 at 10.93.0.4 (nothing listens on its ssh port)", err)
        self.assertNotIn("ssh: ", err)  # in our words, not ssh's

    def test_one_worker_does_not_come(self):
        worker = self.start_worker(1, n_workers=2)
        _, err = self.end(self.start_master("--pai-timeout", 15, "true", n_workers=2), 75)
        last = err.splitlines()[-1]
        self.assertIn("1 of 3 tasks did not answer", last)
        self.assertIn("worker-0 at 10.93.0.3", last)
        self.assertNotIn("worker-1", last)
        _, said = self.end(worker, 75)
        self.assertIn("exit code 75", said)

    def test_no_master_comes(self):
        _, err = self.end(self.start_worker(0, "--pai-timeout", 2), 75)
        self.assertIn("the master did not connect within 2 s (--pai-timeout)", err)

    def test_no_job_of_openpai(self):
        for words in (["--pai", "true"], ["--pai-worker"]):
            with self.subTest(words=words):
                job = Job(*words)
                _, err = self.end(job, 2)
                self.assertIn("PAI_TASK_ROLE_LIST is not set", err)

    def test_contradictions(self):
        for words, part in [(["--pai", "-H", "a:3", "true"], "--hosts contradicts --pai"),
                            (["--pai", "--hostfile", "/nonexistent", "true"],
                             "--hostfile contradicts --pai"),
                            (["--pai", "--pai-worker", "true"],
                             "--pai and --pai-worker exclude each other"),
                            (["--pai-worker", "python", "train.py"],
                             'takes no command, but got "python"')]:
            with self.subTest(words=words):
                _, err = self.end(Job(*words, env=variables("master-0", 1)), 2)
                self.assertIn(part, err)
                self.assertEqual(err.count("\n"), 1)

    def test_no_mpirun(self):
        job = Job("--pai", "--mpi", "true", env={**variables("master-0", 1), "PATH": "/nowhere"})
        _, err = self.end(job, 127)  # and no waiting for worker-0
        self.assertIn("horovod does not find an installed MPI", err)

    def test_stopped_while_it_waits(self):
        master = self.start_master("true")
        self.assertTrue(eventually(lambda: variable(master.process.pid, MARK), 10))
        time.sleep(1)
        master.process.send_signal(signal.SIGTERM)
        self.end(master, 143)


class Ending(Containers):
    def test_exit_code_is_the_jobs(self):
        worker = self.start_worker()
        master = self.start_master("sh", "-c", "[ $HOROVOD_RANK = 0 ] || exit 7; sleep 99")
        _, err = self.end(master, 7)
        self.assertIn("rank 1: exit code 7", err)
        self.assertIn("on host worker-0", err)
        self.end(worker, 7)

    def test_worker_dies_in_training(self):
        master, _ = self.start_training()
        begin = time.monotonic()
        WORLD.kill("worker-0")
        _, err = self.end(master, 69)
        self.assertLess(time.monotonic() - begin, 5 * SLACK)
        self.assertIn("lost the agent on host worker-0", err)
        self.assertRegex(err, "task worker-0 (was lost|is gone)")

    def test_command_of_the_worker_dies_in_training(self):
        master, worker = self.start_training()
        begin = time.monotonic()
        worker.process.kill()
        _, err = self.end(master, 69)
        self.assertLess(time.monotonic() - begin, 5 * SLACK)
        self.assertIn("task worker-0 is gone", err)

    def test_master_is_killed(self):
        master, worker = self.start_training()
        WORLD.kill("master-0")
        _, err = self.end(worker, 69)
        self.assertIn("lost the master: it was killed", err)
        self.assertTrue(eventually(lambda: not any(
            variable(pid, "HOROVOD_RANK") for pid in WORLD.processes("worker-0")), 5 * SLACK))
        master.process.communicate()

    def test_master_is_stopped(self):
        master, worker = self.start_training()
        master.process.send_signal(signal.SIGTERM)
        self.end(master, 143)
        self.end(worker, 143)


class WithoutSsh(Containers):
    """Workers dial a port of the master's, in place of ssh."""

    def setUp(self):
        self.secret = WORLD.config("secret")
        self.secret.write_text(os.urandom(32).hex())
        self.secret.chmod(0o600)

    def test_a_job(self):
        master = self.start_master("--secret-file", self.secret, HVD_INFO, "--transports",
                                   has_sshd=False)
        self.wait_until_said(master, "missing: worker-0")
        worker = self.start_worker(0, "--secret-file", self.secret, has_sshd=False)
        out, _ = self.end(master, 0)
        self.assertRegex(out, r"from rank 0 to rank 1 +tcp")
        _, err = self.end(worker, 0)
        self.assertIn("the master ended with exit code 0", err)

    def test_no_worker_has_a_port(self):
        master, worker = self.start_training("--secret-file", self.secret, has_sshd=False)
        # Ranks listen for each other; nothing else does.
        lines = subprocess.run([*WORLD.inside("worker-0"), "ss", "-ltnpH"], check=True, text=True,
                               capture_output=True).stdout.splitlines()
        self.assertEqual(lines, [])
        master.process.terminate()
        self.end(master, 143)
        self.end(worker, 143)

    def test_port_that_every_task_has(self):
        """OpenPAI gives each one labelled http, whatever the job file says."""
        def of(task):
            told = {name: value for name, value in variables(task, 1).items()
                    if not name.endswith("_horovod")}
            return {name: "" for name in variables(task, 1)} | told | {
                "PAI_PORT_LIST_master_0_http": str(AGENT_PORT + 5)}
        master = self.start_master("--secret-file", self.secret, "true", has_sshd=False,
                                   env=of("master-0"))
        worker = self.start_worker(0, "--secret-file", self.secret, has_sshd=False,
                                   env=of("worker-0"))
        self.end(master, 0)
        self.end(worker, 0)

    def test_exit_code_is_the_jobs(self):
        worker = self.start_worker(0, has_sshd=False)
        _, err = self.end(self.start_master("--secret-file", self.secret, "sh", "-c", "exit 7",
                                            has_sshd=False), 7)
        self.end(worker, 7)

    def test_master_is_killed(self):
        master, worker = self.start_training("--secret-file", self.secret, has_sshd=False)
        WORLD.kill("master-0")
        _, err = self.end(worker, 69)
        self.assertIn("lost the master: it was killed", err)
        master.process.communicate()

    def test_one_worker_does_not_come(self):
        worker = self.start_worker(1, n_workers=2, has_sshd=False)
        _, err = self.end(self.start_master("--secret-file", self.secret, "--pai-timeout", 6,
                                            "true", n_workers=2, has_sshd=False), 75)
        self.assertIn("1 of 3 tasks did not answer within 6 s (--pai-timeout): worker-0 at "
                      "10.93.0.3", err)
        self.end(worker, 75)

    def test_mpirun(self):
        """Its commands are carried: it has no other way to a task, its own included."""
        fake = WORLD.directory / "shells"
        fake.mkdir(exist_ok=True)
        (fake / "mpirun").write_text(
            "#!/bin/sh\n[ \"$1\" = --version ] && exec echo 'Intel(R) MPI Library'\n"
            "for task in master-0 worker-0; do $I_MPI_HYDRA_BOOTSTRAP_EXEC -x -q $task \"echo on "
            "$task: \\$PAI_CURRENT_TASK_ROLE_NAME\"; done; exit 4\n")
        (fake / "mpirun").chmod(0o755)
        worker = self.start_worker(0, has_sshd=False)
        master = self.start_master("--mpi", "--secret-file", self.secret, "true", has_sshd=False,
                                   env={"PATH": f"{fake}:{os.environ['PATH']}"})
        out, _ = self.end(master, 4)
        self.assertIn("on master-0: master\n", out)
        self.assertIn("on worker-0: worker\n", out)
        self.end(worker, 4)

    def test_nobody_has_the_secret(self):
        _, err = self.end(self.start_worker(0, "--secret-file", self.secret, "--pai-timeout", 2,
                                            has_sshd=False), 75)
        self.assertIn("the master did not answer within 2 s (--pai-timeout)", err)

    def test_worker_dies_in_training(self):
        master, _ = self.start_training("--secret-file", self.secret, has_sshd=False)
        WORLD.kill("worker-0")
        _, err = self.end(master, 69)
        self.assertIn("lost the agent on host worker-0", err)

    def start_worker(self, index=0, *words, **options):
        words = words or ("--secret-file", self.secret)
        return super().start_worker(index, *words, **options)


if __name__ == "__main__":
    if os.getuid() != 0:
        raise SystemExit("test_pai_job.py makes network namespaces: run it as root")
    main()
