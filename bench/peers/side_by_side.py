#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure hvd-bench beside other collective libraries on this machine, in interleaved rounds.

    side_by_side.py --set local2,colls --rounds 5 --out results.jsonl
    side_by_side.py --set veth,veth1g          (root: makes two network namespaces, removes them)
    side_by_side.py --from results.jsonl       (only the tables of an earlier run)

In every round each contender runs once, in rotated order, so that noise falls on all alike.
Contenders: hvd-bench (--ours); openmpi, mpich, impi through mpi_loop.c next to this script, built
with each MPI's own mpicc (mpich-mt: MPICH at thread level "multiple"); oneccl, gloo and the
original Horovod (hvdnew-gloo, hvdnew-ompi) through worker.py of the peer rig (--rig); ours-torch is
horovod.torch of this tree under the same worker, when --only asks for it. The peers are
the venvs v_ompi, v_mpich, v_impi, v_ccl, v_torch found in --lab. What is absent is named and left
out; without hvd-bench its column is a dash.

A ratio is the median over the rounds of (ours / reference) within one round, with the lowest and
the highest round beside it. Where the ratio of the medians falls on the other side of a target, the
row is unsettled. The best peer of a
row is the one with the smallest median over the rounds. A median is that of blocking calls, for
each of which the slowest rank counts.
"""
import argparse
import collections
import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from grid import BEST, KI, MANY, MI, SETS, TARGETS, Test, alone_of, limit_for

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CORES = os.cpu_count()
OWNER = "HVD_SIDE_BY_SIDE"  # in the environment of every process started here, to find them again

# ---- where it runs ----------------------------------------------------------------------------


class Local:
    """All ranks on this machine as it is."""
    two = False

    def __init__(self, work):
        self.path = []

    def on(self, node, argv):
        return argv

    def sent(self):
        return 0

    def stray(self):
        return []

    def close(self):
        pass


class TwoNodes:
    """Two namespaces, "node1" and "node2", joined by one veth pair; root only.

    Launchers that want ssh find a stand-in for it in PATH that enters the namespace instead.
    """
    two = True
    NET = "10.99.7"
    ENTER = ["unshare", "--uts", "sh", "-c"]

    def __init__(self, work, shape=None):
        self.names = ["hvdbench%dn%d" % (os.getpid(), n) for n in (1, 2)]
        self.etc = [Path("/etc/netns") / n for n in self.names]
        self.shim = Path(tempfile.mkdtemp(prefix="ssh.", dir=work))
        self.path = [str(self.shim)]
        try:
            self.make(shape)
        except BaseException:
            self.close()
            raise

    def make(self, shape):
        hosts = "127.0.0.1 localhost\n%s.1 node1\n%s.2 node2\n" % (self.NET, self.NET)
        for name, etc in zip(self.names, self.etc):
            ip("netns", "add", name)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(hosts)
        one, two = self.names
        ip("link", "add", "eth0", "netns", one, "type", "veth",
           "peer", "name", "eth0", "netns", two)
        for n, name in enumerate(self.names, 1):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "addr", "add", "%s.%d/24" % (self.NET, n), "dev", "eth0")
            if shape:
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf",
                                "rate", shape, "burst", "128kb", "latency", "20ms"], check=True)
        ssh = self.shim / "ssh"
        ssh.write_text(SSH_SHIM.format(one=one, two=two, net=self.NET))
        ssh.chmod(0o755)

    def on(self, node, argv):
        return (["ip", "netns", "exec", self.names[node]] + self.ENTER +
                ['hostname node%d; exec "$@"' % (node + 1), "sh"] + argv)

    def sent(self):
        """Bytes that node1 has sent: proves that the data crossed the wire."""
        out = ip("-n", self.names[0], "-s", "-j", "link", "show", "eth0")
        return json.loads(out)[0]["stats64"]["tx"]["bytes"]

    def stray(self):
        """Processes left in our namespaces; nobody else can be there."""
        pids = []
        for name in self.names:
            out = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            pids += [int(p) for p in out.stdout.split()]
        return pids

    def close(self):
        kill_all(self.stray(), signal.SIGKILL)
        for name, etc in zip(self.names, self.etc):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(etc, ignore_errors=True)


SSH_SHIM = """#!/bin/sh
# Stand-in for ssh: "ssh [options] node1 command" runs the command in the namespace of that node.
host=
while [ $# -gt 0 ]; do
  case "$1" in
    -o|-p|-i|-l|-F|-E|-S|-W|-b|-c|-m) shift 2;;
    -*) shift;;
    *) [ -n "$host" ] && break; host="${{1#*@}}"; shift;;
  esac
done
case "$host" in
  node1|{net}.1) name={one}; host=node1;;
  node2|{net}.2) name={two}; host=node2;;
  *) echo "ssh stand-in: unknown host $host" >&2; exit 255;;
esac
exec ip netns exec "$name" unshare --uts sh -c "hostname $host; $*"
"""

SHAPES = {"veth": None, "veth1g": "1gbit", "veth10g": "10gbit"}


def ip(*args):
    return subprocess.run(("ip",) + args, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def place_for(net, work):
    place = Local(work) if net == "local" else TwoNodes(work, SHAPES[net])
    try:
        yield place
    finally:
        place.close()


# ---- processes --------------------------------------------------------------------------------


def kill_all(pids, sig):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, sig)


def owned(token):
    """Processes that carry our token, whatever session a launcher put them into."""
    mark = ("%s=%s" % (OWNER, token)).encode()
    pids = []
    for p in Path("/proc").iterdir():
        if p.name.isdigit() and int(p.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (p / "environ").read_bytes().split(b"\0"):
                    pids.append(int(p.name))
    return pids


@dataclass
class Job:
    """The processes of one contender for some tests, and how to read what they report."""
    argvs: list
    env: dict
    envs: list = field(default_factory=list)  # per process, on top of env
    results: Path = None                      # a file of the rig's worker, else standard output


def end(procs, token, place):
    """End what is left of a job: politely, then not."""
    for sig, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        for p in procs:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(p.pid, sig)
        kill_all(set(owned(token)) | set(place.stray()), sig)
        give_up = time.monotonic() + patience
        while time.monotonic() < give_up:
            alive = [p for p in procs if p.poll() is None]
            if not alive and not owned(token) and not place.stray():
                return
            time.sleep(0.05)


def run_job(job, place, timeout, work, log):
    """-> (rows, error text or None)"""
    token = secrets.token_hex(8)
    env = dict(job.env, **{OWNER: token})
    procs, outs = [], []
    deadline = time.monotonic() + timeout
    error = None
    try:
        for i, argv in enumerate(job.argvs):
            out = tempfile.TemporaryFile(dir=work)
            outs.append(out)
            extra = job.envs[i] if job.envs else {}
            procs.append(subprocess.Popen(argv, env=dict(env, **extra), stdout=out, stderr=log,
                                          stdin=subprocess.DEVNULL, start_new_session=True))
        for p in procs:
            p.wait(timeout=max(0.1, deadline - time.monotonic()))
        codes = sorted({p.returncode for p in procs} - {0})
        if codes:
            error = "exit %s" % ", ".join(map(str, codes))
    except subprocess.TimeoutExpired:
        error = "no end after %.0f s" % timeout
    except OSError as e:
        error = str(e)
    finally:
        end(procs, token, place)
    rows = read_worker(job.results) if job.results else read_lines(outs[0] if outs else None)
    for out in outs:
        out.close()
    return rows, error


def read_lines(out):
    rows = []
    if out:
        out.seek(0)
        for line in out.read().decode(errors="replace").splitlines():
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    rows.append(json.loads(line))
    return rows


def read_worker(path):
    """Rows of the rig's worker, which writes every sample."""
    types = {v: k for k, v in RIG_TYPES.items()}
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        w = json.loads(line)
        if w["test"] == "startup":
            continue
        r = {"op": w["test"].rstrip("_"), "dtype": types[w["dtype"]], "bytes": w["bytes"],
             "ranks": w["np"], "ok": w.get("ok", True)}
        s = sorted(x * 1e6 for x in w["s"])
        if s:
            r.update(median_us=s[len(s) // 2], p99_us=s[int(len(s) * 0.99)], min_us=s[0],
                     samples=len(s))
        else:
            r["error"] = w.get("error", "no samples")
        rows.append(r)
    return rows


# ---- launchers --------------------------------------------------------------------------------


def launch_openmpi(mpirun, ranks, place, env, debian=False):
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    a = [str(mpirun), "-np", str(ranks), "--bind-to", "none"]
    if debian:
        a += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self" if place.two else "vader,self"]
    if ranks > CORES:
        a += ["--mca", "mpi_yield_when_idle", "1"]
    if not place.two:
        return a + ["--oversubscribe"]
    net = place.NET + ".0/24"
    each = ranks // 2
    a += ["--map-by", "ppr:%d:node" % each, "-H", "node1:%d,node2:%d" % (each, each),
          "--mca", "btl_tcp_if_include", net]
    if debian:
        a += ["--mca", "oob_tcp_if_include", net]
    else:  # else it finds a way around the network
        a += ["--mca", "prte_if_include", net, "--mca", "pml", "ob1",
              "--mca", "btl", "tcp,self" + (",sm" if each > 1 else ""),
              "--prefix", str(mpirun.parents[1])]
    for k in sorted(env):
        if k in ("PATH", OWNER) or k.startswith(("BENCH_", "OMP_NUM", "HOROVOD_")):
            a += ["-x", k]
    return a


def launch_hydra(venv, ranks, place, env):
    if place.two:  # without this UCX goes through shared memory, namespaces or not
        env.update(UCX_TLS="tcp,self", UCX_NET_DEVICES="eth0", FI_PROVIDER="tcp")
    return hydra(venv, ranks, place)


def launch_intel(venv, ranks, place, env):
    lib = str(venv / "lib")
    env.update(I_MPI_ROOT=str(venv), LD_LIBRARY_PATH=lib, FI_PROVIDER_PATH=lib,
               I_MPI_FABRICS="shm" if not place.two else "shm:ofi" if ranks > 2 else "ofi")
    if place.two:  # both nodes share the cores: its own pinning puts both ranks on core 0
        env.update(FI_PROVIDER="tcp", I_MPI_PIN="0")
    return hydra(venv, ranks, place)


def hydra(venv, ranks, place):
    a = [str(venv / "bin" / "mpiexec"), "-n", str(ranks)]
    if place.two:
        a += ["-launcher", "ssh", "-hosts", "node1,node2", "-ppn", str(ranks // 2), "-genvall"]
    return a


def launch_horovodrun(venv, ranks, place, env):
    a = [str(venv / "bin" / "horovodrun"), "--gloo", "-np", str(ranks)]
    each = ranks // 2
    return a + (["-H", "node1:%d,node2:%d" % (each, each), "--network-interfaces", "eth0"]
                if place.two else ["-H", "localhost:%d" % ranks])


# ---- contenders -------------------------------------------------------------------------------


class Contender:
    peer = True  # may be the best peer of a row

    def __init__(self, name, opts):
        self.name, self.opts = name, opts

    def jobs(self, tests, ranks, place):
        raise NotImplementedError

    def pins(self, ranks):
        return self.opts.pin and ranks <= CORES


def base_env(place, *bins):
    env = dict(os.environ, OMP_NUM_THREADS="1")
    env["PATH"] = os.pathsep.join([str(b) for b in bins] + place.path + [env["PATH"]])
    return env


def by_op(tests):
    """-> for each run of a benchmark: the type, and its arguments"""
    groups = collections.OrderedDict()
    for t in tests:
        groups.setdefault((t.op, t.dtype, t.many), []).append(str(t.bytes))
    for (op, dtype, many), sizes in groups.items():
        what = ["--tensors", tensor_list(MANY[many][1])] if many else ["--bytes", ",".join(sizes)]
        yield dtype, ["--op", op] + what


def tensor_list(sizes):
    """"400,40*500": as benchmarks read it."""
    runs = [[n, len(list(same))] for n, same in itertools.groupby(sizes)]
    return ",".join("%d*%d" % (n, times) for n, times in runs)


class Ours(Contender):
    """hvd-bench: starts its own ranks locally; one process per namespace otherwise."""
    peer = False

    def __init__(self, name, opts, encrypt="never"):
        super().__init__(name, opts)
        self.encrypt = encrypt

    def jobs(self, tests, ranks, place):
        for dtype, what in by_op(tests):
            a = [str(self.opts.ours), *what, "--dtype", dtype,
                 "--ranks", str(ranks), "--json", "--budget", str(self.opts.budget),
                 "--max-samples", str(self.opts.max_samples)]
            a += ["--pin"] if self.pins(ranks) else []
            env = base_env(place)
            yield self.over_network(a, ranks, place, env) if place.two else Job([a], env)

    def over_network(self, argv, ranks, place, env):
        secret = self.opts.work / "secret"
        if not secret.exists():
            secret.touch(mode=0o600)
            secret.write_text(secrets.token_hex(32))
        each = ranks // 2
        env.update(HOROVOD_SIZE=str(ranks), HOROVOD_LOCAL_SIZE=str(each),
                   HOROVOD_CROSS_SIZE="2", HOROVOD_RENDEZVOUS_ADDR=place.NET + ".1",
                   HOROVOD_RENDEZVOUS_PORT=str(20000 + secrets.randbelow(10000)),
                   HOROVOD_SECRET_FILE=str(secret), HOROVOD_ENCRYPT=self.encrypt)
        argv = argv + ["--no-fork"]
        argvs = [place.on(r // each, argv + (["--serve-rendezvous"] if r == 0 else []))
                 for r in range(ranks)]
        envs = [{"HOROVOD_RANK": str(r), "HOROVOD_LOCAL_RANK": str(r % each),
                 "HOROVOD_CROSS_RANK": str(r // each)} for r in range(ranks)]
        return Job(argvs, env, envs)


class MpiLoop(Contender):
    """An MPI library under mpi_loop.c."""

    def __init__(self, name, opts, venv, loop, launch, extra, crowded):
        super().__init__(name, opts)
        self.venv, self.loop, self.launch = venv, loop, launch
        self.extra, self.crowded = extra, crowded

    def jobs(self, tests, ranks, place):
        for what in self.runs(tests):
            env = base_env(place, self.venv / "bin")
            a = [str(self.loop), "--peer", self.name, *what, "--budget",
                 str(self.opts.budget), "--max-samples", str(self.opts.max_samples)]
            a += ["--pin"] if self.pins(ranks) else []
            a += ["--small-pages"] if self.opts.small_pages else []
            a += self.extra
            yield Job([place.on(0, self.launch(self.venv, ranks, place, env) + a)], env)

    @staticmethod
    def runs(tests):
        """Operations of the same sizes in one start, which takes an MPI up to a second."""
        ops = collections.OrderedDict()
        for dtype, (_, op, option, sizes) in by_op(tests):
            if dtype == "float32":
                ops.setdefault((option, sizes), []).append(op)
        return [["--op", ",".join(names), option, sizes] for (option, sizes), names in ops.items()]


class Floor(Contender):
    """Every rank copies its buffer once, at the same moment."""
    peer = False

    def __init__(self, opts, loop):
        super().__init__("memcpy", opts)
        self.loop = loop

    def jobs(self, tests, ranks, place):
        return self.loop.jobs([Test("memcpy", t.bytes) for t in tests if t.bytes >= MI], ranks,
                              place)


RIG_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class Rig(Contender):
    """A peer under worker.py of the rig. launch None: the ranks are started one by one."""

    @staticmethod
    def knows(test):
        return test.dtype in RIG_TYPES and len(set(MANY[test.many][1] if test.many else ())) < 2

    def __init__(self, name, opts, kind, venv, launch):
        super().__init__(name, opts)
        self.kind, self.venv, self.launch = kind, venv, launch

    def jobs(self, tests, ranks, place):
        results = self.opts.work / ("worker.%s.jsonl" % secrets.token_hex(4))
        todo = [["many", [len(MANY[t.many][1]), MANY[t.many][1][0]], RIG_TYPES[t.dtype]]
                if t.many else
                ["allreduce_" if t.op == "allreduce" else t.op, t.bytes, RIG_TYPES[t.dtype]]
                for t in tests if self.knows(t)]
        env = base_env(place, self.venv / "bin")
        env.update(BENCH_KIND=self.kind, BENCH_PEER=self.name, BENCH_TESTS=json.dumps(todo),
                   BENCH_OUT=str(results), BENCH_NET="veth" if place.two else "local",
                   BENCH_BUDGET=str(self.opts.budget), BENCH_NMAX=str(self.opts.max_samples),
                   BENCH_T0=repr(time.time()), WORLD_SIZE=str(ranks))
        if self.kind == "mpi" and self.pins(ranks):
            env["BENCH_PIN"] = "1"
        if self.kind == "ccl":
            env.update(CCL_SHIM=str(self.opts.lab / "ccl_shim.so"), CCL_ROOT=str(self.venv),
                       CCL_KVS_FILE=str(results) + ".kvs", CCL_ATL_TRANSPORT="mpi",
                       CCL_LOG_LEVEL="error")
        worker = [str(self.venv / "bin" / "python"), str(self.opts.rig / "worker.py")]
        if self.launch:
            argv = self.launch(self.venv, ranks, place, env) + worker
            yield Job([place.on(0, argv)], env, results=results)
            return
        env.update(MASTER_PORT=str(20000 + secrets.randbelow(10000)),
                   MASTER_ADDR=place.NET + ".1" if place.two else "127.0.0.1")
        if place.two:
            env["GLOO_SOCKET_IFNAME"] = "eth0"
        yield Job([place.on(r, worker) for r in range(ranks)], env,
                  [{"RANK": str(r), "LOCAL_RANK": "0" if place.two else str(r)}
                   for r in range(ranks)], results)


class OursInTorch(Rig):
    """horovod.torch of this tree under the rig's worker; only when asked for by --only."""

    peer = False

    def __init__(self, opts):
        super().__init__("ours-torch", opts, "hvd", ROOT / ".venv", self.horovodrun)

    def horovodrun(self, venv, ranks, place, env):
        build = self.opts.ours.resolve().parent
        env["PYTHONPATH"] = str(build / "python")
        return [str(build / "horovodrun"), "-np", str(ranks), "-H",
                "node1:%d,node2:%d" % (ranks // 2, ranks // 2) if place.two
                else "localhost:%d" % ranks]


def openmpi5(venv, ranks, place, env):
    return launch_openmpi(venv / "bin" / "mpirun", ranks, place, env)


def openmpi_debian(venv, ranks, place, env):
    return launch_openmpi(Path("/usr/bin/mpirun"), ranks, place, env, debian=True)


# name, venv, launcher, its own arguments of the loop, fit for more ranks than cores. MPICH 5.0.2
# measured slower at thread level "multiple" when small, faster at 1 and 16 MiB, and with four ranks
# on two cores unusable without it (1.4 s for 1 MiB), so both levels compete.
MPIS = (
    ("openmpi", "v_ompi", openmpi5, [], True),
    ("mpich", "v_mpich", launch_hydra, [], False),
    ("mpich-mt", "v_mpich", launch_hydra, ["--thread-multiple"], True),
    ("impi", "v_impi", launch_intel, [], True),
)
# name, kind of worker, venv, launcher, a file that must exist in the venv (or in the lab)
RIG_PEERS = (
    ("oneccl", "ccl", "v_ccl", launch_intel, "../ccl_shim.so"),
    ("gloo", "gloo", "v_torch", None, "bin/python"),
    ("hvdnew-gloo", "hvd", "v_torch", launch_horovodrun, "bin/horovodrun"),
    ("hvdnew-ompi", "hvd", "v_torch", openmpi_debian, "bin/horovodrun"),
)
# The MPI peers through mpi4py, only when asked for by --only.
PYTHON_LOOPS = tuple((name + "-py", "mpi", venv, launch, "bin/python")
                     for name, venv, launch, extra, _ in MPIS if not extra)


def build_loop(venv, lab):
    """Compile mpi_loop.c with the peer's mpicc; -> path or None.

    Intel MPI without its development package runs what MPICH's mpicc builds: one ABI.
    """
    source, loop = HERE / "mpi_loop.c", lab / ("mpi_loop" + venv.name[1:])
    if loop.exists() and loop.stat().st_mtime > source.stat().st_mtime:
        return loop
    for v in (venv, lab / "v_mpich") if venv.name == "v_impi" else (venv,):
        mpicc = v / "bin" / "mpicc"
        if mpicc.exists():
            env = dict(os.environ, I_MPI_ROOT=str(venv),
                       PATH="%s%s%s" % (v / "bin", os.pathsep, os.environ["PATH"]))
            argv = [str(mpicc), "-std=c11", "-O2", str(source), "-o", str(loop)]
            if subprocess.run(argv, env=env).returncode == 0:
                return loop
    say("%s: cannot build mpi_loop.c" % venv.name)
    return None


def find_contenders(opts):
    found = []
    if opts.ours.exists():
        found += [Ours("ours", opts), Ours("ours-encrypted", opts, "always")]
    else:
        say("ours: no %s, its column stays empty" % opts.ours)
    if not opts.lab or not opts.lab.is_dir():
        say("no lab folder (set LAB or --lab): no peers")
        return found
    loops = []
    for name, folder, launch, extra, crowded in MPIS:
        venv = opts.lab / folder
        loop = build_loop(venv, opts.lab) if (venv / "bin" / "mpiexec").exists() else None
        if loop:
            loops.append(MpiLoop(name, opts, venv, loop, launch, extra, crowded))
        else:
            say("%s: not in %s" % (name, opts.lab))
    found += loops
    if loops:
        found.append(Floor(opts, loops[0]))
    if not (opts.rig / "worker.py").exists():
        say("no peer rig at %s: oneccl, gloo and the original Horovod are left out" % opts.rig)
        return found
    found.append(OursInTorch(opts))
    for name, kind, folder, launch, needs in RIG_PEERS + PYTHON_LOOPS:
        venv = opts.lab / folder
        if (venv / "bin" / "python").exists() and (venv / needs).exists():
            found.append(Rig(name, opts, kind, venv, launch))
        else:
            say("%s: not in %s" % (name, opts.lab))
    return found


# ---- rounds -----------------------------------------------------------------------------------


def say(text):
    print("%s %s" % (time.strftime("%H:%M:%S"), text), file=sys.stderr, flush=True)


def taking_part(contenders, bench, opts):
    optional = {name for name, *_ in PYTHON_LOOPS} | {"ours-torch"}
    for c in contenders:
        if isinstance(c, Ours):
            wanted = c.name in bench.ours
        elif isinstance(c, Floor):
            wanted = bench.floor
        elif isinstance(c, MpiLoop):
            wanted = bench.peers and (c.crowded or bench.ranks <= CORES)
        else:
            wanted = bench.peers and (c.name not in optional or c.name in opts.only)
        if wanted and (not opts.only or c.name in opts.only) and c.name not in opts.skip:
            yield c


def run_contender(c, bench, place, opts, log):
    """-> rows; a failure is a row with an error"""
    rows, deadline = [], time.monotonic() + opts.timeout
    sent = place.sent()
    for job in c.jobs(bench.tests, bench.ranks, place):
        got, error = run_job(job, place, max(1, deadline - time.monotonic()), opts.work, log)
        rows += got
        if error:
            rows.append({"error": error})
    moved = place.sent() - sent
    asked = sum(r["bytes"] * r.get("samples", 0) for r in rows if "median_us" in r)
    if place.two and moved < 0.4 * asked:  # an allreduce of two sends its size once from each
        for r in rows:
            r["error"] = "only %d of %d bytes crossed the wire" % (moved, asked)
    return rows


def run_round(name, rnd, contenders, opts, raw, log):
    """-> whether anybody was measured"""
    bench = SETS[name]
    team = list(taking_part(contenders, bench, opts))
    if not team:
        say("%s: nobody to measure" % name)
        return False
    if bench.net != "local" and os.geteuid() != 0:
        say("%s: needs root for network namespaces, left out" % name)
        return False
    load = os.getloadavg()[0]
    shift = rnd % len(team)
    with place_for(bench.net, opts.work) as place:
        for c in team[shift:] + team[:shift]:
            log.write(("=== %s round %d %s\n" % (name, rnd, c.name)).encode())
            log.flush()
            start = time.monotonic()
            rows = run_contender(c, bench, place, opts, log)
            for r in rows:
                r.update(set=name, run=opts.run, round=rnd, peer=c.name, load=round(load, 2))
                raw.write(json.dumps(r) + "\n")
            raw.flush()
            wrong = sorted({r["error"] for r in rows if "error" in r})
            say("%s round %d/%d %-14s %5.1f s, %d rows%s" % (
                name, rnd + 1, opts.rounds, c.name, time.monotonic() - start,
                sum("median_us" in r for r in rows), "; " + "; ".join(wrong) if wrong else ""))
    return True


def run_sets(contenders, opts, raw, log):
    """A round of every set, then the next round; what would not end in time is left out."""
    end = time.monotonic() + 60 * opts.minutes
    took = dict.fromkeys(opts.set, 0)
    for rnd in range(opts.rounds):
        for name in list(took):
            start = time.monotonic()
            if start + took[name] > end:
                say("%s round %d: no time left" % (name, rnd + 1))
            elif run_round(name, rnd, contenders, opts, raw, log):
                took[name] = time.monotonic() - start
            else:
                del took[name]


# ---- tables -----------------------------------------------------------------------------------


def show_size(n):
    for unit, k in (("MiB", MI), ("KiB", KI)):
        if n >= k:
            return "%g %s" % (round(n / k, 1), unit)
    return "%d B" % n


def show_time(us):
    if us is None:
        return "-"
    for unit, k in (("s", 1e6), ("ms", 1e3)):
        if us >= k:
            return "%.2f %s" % (us / k, unit)
    return "%.2f us" % us


def show_test(t):
    return t.many or show_size(t.bytes)


@dataclass(frozen=True)
class Ratio:
    median: float  # of the ratios of single rounds
    of_medians: float  # the ratio of the medians over all rounds
    lowest: float  # of a round
    highest: float


class Results:
    """Medians by set, contender, test and round."""

    def __init__(self, rows):
        self.cells = collections.defaultdict(dict)
        self.loads = collections.defaultdict(dict)
        self.notes = collections.defaultdict(list)
        for r in rows:
            self.add(r)

    def add(self, r):
        peer, rnd = r["peer"], (r["run"], r["round"])
        self.loads[r["set"]][rnd] = r["load"]
        error = r.get("error") or ("WRONG RESULT" if not r.get("ok", True) else None)
        if error:
            what = " ".join(str(r[k]) for k in ("op", "dtype", "bytes") if k in r)
            note = "%s: %s%s" % (peer, what + ": " if what else "", error)
            if note not in self.notes[r["set"]]:
                self.notes[r["set"]].append(note)
        elif "median_us" in r:
            key = (r["set"], peer, r["op"], r["dtype"], r["bytes"])
            self.cells[key][rnd] = r["median_us"]

    def rounds(self, name, who, test):
        """-> {round: median in us} of a contender, or of a named reference"""
        op, dtype, size = test.op, test.dtype, test.bytes
        if who == "memcpy":
            op = "memcpy"
        elif who == "ours float32":
            who, dtype = "ours", "float32"
        elif who == "one tensor":
            alone = alone_of(test)
            who, op, size = "ours", alone.op, alone.bytes
        return self.cells.get((name, who, op, dtype, size), {})

    def median(self, name, who, test):
        r = self.rounds(name, who, test)
        return statistics.median(r.values()) if r else None

    def ratio(self, name, subject, reference, test):
        a, b = self.rounds(name, subject, test), self.rounds(name, reference, test)
        both = sorted(a[i] / b[i] for i in a if i in b)
        if not both:
            return None
        of_medians = statistics.median(a.values()) / statistics.median(b.values())
        return Ratio(statistics.median(both), of_medians, both[0], both[-1])

    def peers(self, name):
        seen = {k[1] for k in self.cells if k[0] == name}
        known = [p[0] for p in MPIS + RIG_PEERS + PYTHON_LOOPS]
        return [p for p in known if p in seen]

    def best(self, name, test):
        medians = {p: self.median(name, p, test) for p in self.peers(name)}
        medians = {p: m for p, m in medians.items() if m is not None}
        return min(medians, key=medians.get) if medians else None


def verdict(ratio, limit):
    """A noisy machine may give two honest answers; then there is none."""
    if limit is None:
        return ["-", "-"]
    if ratio is None:
        word = "-"
    elif (ratio.median <= limit) != (ratio.of_medians <= limit):
        word = "unsettled"
    else:
        word = "PASS" if ratio.median <= limit else "FAIL"
    return ["<= %g" % limit, word]


def show_ratio(ratio):
    if ratio is None:
        return "-"
    return "%.2f (%.2f to %.2f)" % (ratio.median, ratio.lowest, ratio.highest)


def markdown(head, rows):
    lines = ["| %s |" % " | ".join(r) for r in [head] + rows]
    return lines[:1] + ["|" + "---|" * len(head)] + lines[1:]


def title(test):
    return [test.op, test.dtype, show_test(test)]


def peer_table(name, res):
    peers = res.peers(name)
    rows = []
    for t in SETS[name].tests:
        best = res.best(name, t)
        ratio = res.ratio(name, "ours", best, t)
        rows.append(title(t) + [
            show_time(res.median(name, "ours", t)), best or "-",
            show_time(res.median(name, best, t)), show_ratio(ratio)] +
            verdict(ratio, limit_for(name, "ours", BEST, t)) +
            [show_time(res.median(name, p, t)) for p in peers])
    return markdown(["op", "type", "size", "ours", "best peer", "its median", "ours / best",
                     "target", "verdict"] + peers, rows)


def reference_table(name, subject, reference, res):
    rows = []
    for t in SETS[name].tests:
        limit = limit_for(name, subject, reference, t)
        ratio = res.ratio(name, subject, reference, t)
        if (ratio is None and limit is None) or reference == "ours " + t.dtype:
            continue
        rows.append(title(t) + [show_time(res.median(name, subject, t)),
                                show_time(res.median(name, reference, t)), show_ratio(ratio)] +
                    verdict(ratio, limit))
    return markdown(["op", "type", "size", subject, reference, "ratio", "target", "verdict"], rows)


def report(rows, budget_note=""):
    res = Results(rows)
    lines = []
    for name in [n for n in SETS if n in res.loads]:
        bench, loads = SETS[name], res.loads[name]
        lines += ["## %s: %d ranks, %s" % (name, bench.ranks, bench.net), "",
                  "%d round(s), load average at their start: %s.%s" % (
                      len(loads), ", ".join("%.2f" % loads[r] for r in sorted(loads)),
                      budget_note), ""]
        if bench.peers:
            lines += peer_table(name, res) + [""]
        pairs = [(s, r) for n, _, s, r, _ in TARGETS if n == name and r != BEST]
        for subject, reference in dict.fromkeys(pairs):
            lines += ["%s against %s:" % (subject, reference), ""]
            lines += reference_table(name, subject, reference, res) + [""]
        lines += ["- " + note for note in res.notes[name]] + ([""] if res.notes[name] else [])
    return "\n".join(lines)


# ---- main -------------------------------------------------------------------------------------


def options():
    ap = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    lab = os.environ.get("LAB")
    def names(s): return s.split(",")
    ap.add_argument("--set", type=names, default=["local2"], help="all, or some of: %s" %
                    " ".join(SETS))
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--ours", type=Path, default=ROOT / "build" / "hvd-bench")
    ap.add_argument("--lab", type=Path, default=Path(lab) if lab else None,
                    help="folder with the peers (default $LAB)")
    ap.add_argument("--rig", type=Path, default=ROOT.parent / "shared" / "peers")
    ap.add_argument("--only", type=names, default=[], help="contenders; also openmpi-py, mpich-py,"
                    " impi-py, the same peers through mpi4py")
    ap.add_argument("--skip", type=names, default=[])
    ap.add_argument("--budget", type=float, default=1.0, help="seconds per test")
    ap.add_argument("--max-samples", type=int, default=1000)
    ap.add_argument("--minutes", type=float, default=float("inf"),
                    help="begin nothing that would take longer than this in all")
    ap.add_argument("--max-bytes", type=int, default=1 << 40, help="leave out larger tests")
    ap.add_argument("--ops", type=names, default=[], help="only these operations")
    ap.add_argument("--no-pin", dest="pin", action="store_false",
                    help="do not bind rank i to core i")
    ap.add_argument("--small-pages", action="store_true",
                    help="the buffers of the C loop do not ask for huge pages")
    ap.add_argument("--timeout", type=float, default=180, help="seconds per contender and round")
    ap.add_argument("--out", type=Path, default=Path("side_by_side.jsonl"),
                    help="raw rows, appended")
    ap.add_argument("--report", type=Path, help="Markdown tables (default: --out with .md)")
    ap.add_argument("--from", dest="source", type=Path, help="tables of this file, run nothing")
    ap.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    opts = ap.parse_args()
    if opts.set == ["all"]:
        opts.set = list(SETS)
    for name in opts.set:
        if name not in SETS:
            ap.error("unknown set %s" % name)
    opts.ours = opts.ours.absolute()
    opts.rig = opts.rig.absolute()
    opts.lab = opts.lab.absolute() if opts.lab else None
    return opts


def measure(opts):
    """Run the sets -> the rows of this run."""
    for name, bench in SETS.items():
        kept = tuple(t for t in bench.tests if t.bytes <= opts.max_bytes and
                     (not opts.ops or t.op in opts.ops))
        SETS[name] = replace(bench, tests=kept)
    with tempfile.TemporaryDirectory(prefix="side_by_side.") as work, \
            open(opts.out, "a+") as raw, open(str(opts.out) + ".log", "ab") as log:
        opts.work = Path(work)
        opts.run = round(time.time())
        raw.seek(0, os.SEEK_END)
        start = raw.tell()
        contenders = find_contenders(opts)
        run_sets(contenders, opts, raw, log)
        raw.seek(start)
        return [json.loads(line) for line in raw]


def stop(signum, frame):
    raise SystemExit(128 + signum)


def main():
    opts = options()
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, stop)
    if opts.source:
        rows = [json.loads(line) for line in opts.source.read_text().splitlines()]
        note = ""
    else:
        rows = measure(opts)
        note = " Budget %g s per test, at most %d samples%s." % (
            opts.budget, opts.max_samples, ", pinned" if opts.pin else "")
    text = report(rows, note)
    print(text)
    if opts.report or not opts.source:
        (opts.report or opts.out.with_suffix(".md")).write_text(text + "\n")
    return 1 if opts.strict and "| FAIL |" in text else 0


if __name__ == "__main__":
    sys.exit(main())
