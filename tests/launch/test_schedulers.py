#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Jobs of horovodrun without -np and -H, in what schedulers leave: their variables and files.

Usage: test_schedulers.py BUILD-DIRECTORY [unittest arguments]     (as root)

The hosts are network namespaces, reached over ssh. tests/foreign_launchers/run.py has a real Slurm.
"""
import pathlib
import shutil
import tempfile

from launching import SLACK, Case, Job, command_line, eventually, main, python
from world import World

HOSTS = {"node1": ("eth7", ""), "node2": ("net3", "")}
ADDRESSES = ("10.93.0.2", "10.93.0.3")
WHERE = python("import os, socket; e = os.environ; print(e['HOROVOD_RANK'], 'of', "
               "e['HOROVOD_SIZE'], 'on', socket.gethostname(), e.get('SLURMD_NODENAME'))")
# What the MPI Operator mounts, and ssh in the place of kubectl: without -i nothing is read.
KUBEXEC = """#!/bin/sh
set -x
POD_NAME=$1
shift
{folder}/kubectl exec ${{POD_NAME}} -- /bin/sh -c "$*"
"""
KUBECTL = """#!/bin/sh
[ "$1" = exec ] && shift
if [ "$1" = -i ]; then shift; else exec </dev/null; fi
[ "$2 $3 $4" = "-- /bin/sh -c" ] && exec ssh -F {config} "$1" "$5"
"""
# /etc with more in it, for one process.
OTHER_ETC = 'mount --make-rprivate /; mount --bind "$0" /etc; exec "$@"'
WORLD = None


def setUpModule():
    global WORLD
    WORLD = World(HOSTS)


def tearDownModule():
    WORLD.close()


class Schedulers(Case):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="hvd-schedulers-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def run_job(self, env, *words, expect=0, here="launcher", before=(), command=None):
        """(stdout, stderr) of a job that is given no hosts, and leaves nothing."""
        env = {"HOROVODRUN_SSH_COMMAND": f"ssh -F {WORLD.config()}", **env}
        job = Job(*words, *(command or WHERE), before=[*WORLD.inside(here), *before],
                  env={name: value for name, value in env.items() if value is not None})
        code, out, err = job.wait()
        out, err = out.decode(), err.decode()
        self.assertEqual(code, expect, f"{out}\n{err}")
        self.finish(job, 5)
        for host in HOSTS:
            self.assertTrue(eventually(lambda host=host: not WORLD.processes(host), 5 * SLACK),
                            [command_line(pid) for pid in WORLD.processes(host)])
        return out, err

    def assert_places(self, out, *hosts):
        for rank, host in enumerate(hosts):
            self.assertIn(f"[{rank}]<stdout>:{rank} of {len(hosts)} on {host} ", out)
        self.assertEqual(out.count(" of "), len(hosts))

    def file(self, text):
        path = self.folder / "hosts"
        path.write_text(text)
        return str(path)

    def assert_two_and_two(self, env, line, **options):
        out, err = self.run_job(env, **options)
        self.assert_places(out, "node1", "node1", "node2", "node2")
        self.assertEqual(err, f"horovodrun: 4 ranks on 2 hosts, from {line}\n")


class Slurm(Schedulers):
    ENV = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
           "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
           "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    LINE = "SLURM_JOB_NODELIST (node[1-2], 2 tasks each)"

    def test_allocation(self):
        self.assert_two_and_two(self.ENV, self.LINE)

    def test_batch_script_on_the_first_node(self):
        """It is this host because Slurm says so; others are not told that they are it."""
        env = {**self.ENV, "SLURMD_NODENAME": "node1", "SLURM_PROCID": "0",
               "SLURM_TASKS_PER_NODE": "2,1"}
        out, err = self.run_job(env, here="node1",
                                before=["unshare", "--uts", "sh", "-c",
                                        'hostname elsewhere; exec "$0" "$@"'])
        self.assertIn("[0]<stdout>:0 of 3 on elsewhere node1\n", out)
        self.assertIn("[1]<stdout>:1 of 3 on elsewhere node1\n", out)
        self.assertIn("[2]<stdout>:2 of 3 on node2 None\n", out)
        self.assertEqual(err, "horovodrun: 3 ranks on 2 hosts, from SLURM_JOB_NODELIST "
                              "(node[1-2], 3 tasks)\n")

    def test_fewer_ranks_than_tasks(self):
        out, err = self.run_job(self.ENV, "-np", "3")
        self.assert_places(out, "node1", "node1", "node2")
        self.assertEqual(err, f"horovodrun: 3 ranks on 2 hosts, from {self.LINE}\n")

    def test_more_ranks_than_tasks(self):
        _, err = self.run_job(self.ENV, "-np", "5", expect=2)
        self.assertIn(f"horovodrun: 4 slots on 2 hosts, from {self.LINE}\n", err)
        self.assertIn("Requested more processes (5) than there are available slots (4)", err)

    def test_hosts_given_win(self):
        out, err = self.run_job(self.ENV, "-H", "node2:1")
        self.assert_places(out, "node2")
        self.assertEqual(err, "")

    def test_many_copies(self):
        env = {**self.ENV, "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
        _, err = self.run_job(env, expect=2)
        self.assertIn("SLURM_STEP_NUM_TASKS is 4: horovodrun is started several times", err)

    def test_list_too_long(self):
        for nodes in ("node[1-99999999999]", "node[1-10001]", "node[1-1000]-[1-1000]"):
            _, err = self.run_job({**self.ENV, "SLURM_JOB_NODELIST": nodes}, expect=2)
            self.assertIn(f'horovodrun: SLURM_JOB_NODELIST has "{nodes}": ', err)


class Lsf(Schedulers):
    ENV = {"LSB_JOBID": "1077", "LSB_DJOB_NUMPROC": "4", "LSB_MCPU_HOSTS": "node1 2 node2 2 ",
           "LSB_HOSTS": "node1 node1 node2 node2"}

    def test_file(self):
        path = self.file("node1\nnode1\nnode2\nnode2\n")
        self.assert_two_and_two({**self.ENV, "LSB_DJOB_HOSTFILE": path},
                                "LSB_DJOB_HOSTFILE (node1, node2, 2 slots each)")

    def test_pairs(self):
        self.assert_two_and_two(self.ENV, "LSB_MCPU_HOSTS (node1, node2, 2 slots each)")

    def test_names(self):
        self.assert_two_and_two({**self.ENV, "LSB_MCPU_HOSTS": None},
                                "LSB_HOSTS (node1, node2, 2 slots each)")


class Pbs(Schedulers):
    LINE = "PBS_NODEFILE (node1, node2, 2 slots each)"

    def test_line_for_each_slot(self):
        path = self.file("node1\nnode1\nnode2\nnode2\n")
        self.assert_two_and_two({"PBS_JOBID": "12.server", "PBS_NODEFILE": path}, self.LINE)

    def test_line_for_each_host(self):
        env = {"PBS_JOBID": "12.server", "PBS_NODEFILE": self.file("node1\nnode2\n"),
               "PBS_NUM_NODES": "2", "PBS_NUM_PPN": "2"}
        self.assert_two_and_two(env, self.LINE)

    def test_bad_file(self):
        _, err = self.run_job({"PBS_NODEFILE": self.file("node1\n$(reboot)\n")}, expect=2)
        self.assertIn('horovodrun: PBS_NODEFILE has "$(reboot)": not a name of a host', err)


class SkyPilot(Schedulers):
    def test_addresses(self):
        env = {"SKYPILOT_NODE_IPS": "\n".join(ADDRESSES), "SKYPILOT_NUM_NODES": "2",
               "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
        self.assert_two_and_two(
            env, f"SKYPILOT_NODE_IPS ({ADDRESSES[0]}, {ADDRESSES[1]}, 2 slots each)")

    def test_head_node_is_this_one(self):
        env = {"SKYPILOT_NODE_IPS": "\n".join(ADDRESSES), "SKYPILOT_NODE_RANK": "0"}
        out, err = self.run_job(env, here="node1", before=["unshare", "--uts", "sh", "-c",
                                                           'hostname head; exec "$0" "$@"'])
        self.assert_places(out, "head", "node2")
        self.assertIn("2 ranks on 2 hosts, from SKYPILOT_NODE_IPS", err)

    def test_other_nodes(self):
        env = {"SKYPILOT_NODE_IPS": "\n".join(ADDRESSES), "SKYPILOT_NODE_RANK": "1"}
        _, err = self.run_job(env, expect=2)
        self.assertIn("start it once, on the node whose SKYPILOT_NODE_RANK is 0", err)


class MpiOperator(Schedulers):
    def etc(self, hostfile):
        """Words before a command for which /etc has what the operator mounts."""
        etc = self.folder / "etc"
        shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
        (etc / "mpi").mkdir(exist_ok=True)
        (etc / "mpi/hostfile").write_text(hostfile)
        for program, text in [(etc / "mpi/kubexec.sh", KUBEXEC),
                              (self.folder / "kubectl", KUBECTL)]:
            program.write_text(text.format(folder=self.folder, config=WORLD.config()))
            program.chmod(0o755)
        return ["unshare", "--mount", "sh", "-c", OTHER_ETC, str(etc)]

    def test_kubexec(self):
        env = {"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh", "HOROVODRUN_SSH_COMMAND": None,
               "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}
        out, err = self.run_job(env, before=self.etc("node1 slots=2\nnode2 slots=2\n"))
        self.assert_places(out, "node1", "node1", "node2", "node2")
        self.assertIn("horovodrun: 4 ranks on 2 hosts, from /etc/mpi/hostfile "
                      "(node1, node2, 2 slots each)\n", err)

    def test_ssh(self):
        self.assert_two_and_two({}, "/etc/mpi/hostfile (node1, node2, 2 slots each)",
                                before=self.etc("node1:2\nnode2:2\n"))


class Nobody(Schedulers):
    def test_the_number_of_ranks_is_missing(self):
        _, err = self.run_job({}, expect=2)
        self.assertIn("the number of ranks is missing; give -np", err)


if __name__ == "__main__":
    main()
