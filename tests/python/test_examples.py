# SPDX-License-Identifier: Apache-2.0
"""Examples of no framework: the notebook, scripts for launchers; the list of them all."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from horovod import _core

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BUILD = pathlib.Path(_core.__file__).parents[2]


def test_the_list_has_every_example():
    listed = set(re.findall(r"`([\w/]+\.\w+)`", (EXAMPLES / "README.md").read_text()))
    there = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.*")
             if path.is_file() and "__pycache__" not in path.parts}
    assert listed == there - {"README.md"}


def test_the_notebook(tmp_path):
    """Its cells, one after the other, as a kernel runs them."""
    notebook = json.loads((EXAMPLES / "notebook/horovod_run.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 3 and not any(cell.get("outputs") for cell in notebook["cells"])
    program = "\n".join(f"exec(compile({cell!r}, 'cell {i}', 'exec'), globals())"
                        for i, cell in enumerate(cells))
    done = subprocess.run([sys.executable, "-c", program + "\nprint(len(results))"], text=True,
                          cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"


def script(name, tmp_path, **environment):
    """What a script says where a program `mpirun` passes its ranks on to horovodrun."""
    fake = tmp_path / "mpirun"
    fake.write_text('#!/bin/sh\nexec horovodrun "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run([EXAMPLES / "launch" / name], cwd=ROOT, text=True, capture_output=True,
                          timeout=120, env={**os.environ, "PYTHON": "echo",
                                            "PATH": f"{tmp_path}:{BUILD}:{os.environ['PATH']}",
                                            **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1",
         "SLURM_TASKS_PER_NODE": "2"}


@pytest.mark.parametrize("name,environment", [
    ("mpirun.sh", {}), ("mpirun.sh", {"HOSTS": "localhost:1,127.0.0.1:1"}), ("slurm.sh", SLURM)])
def test_scripts_start_the_example_on_two_ranks(name, environment, tmp_path):
    said = script(name, tmp_path, **environment)
    started = re.findall(r"examples/\S+\.py", said)
    assert len(started) == 2 and (ROOT / started[0]).exists(), said


def test_the_job_for_openpai_is_correct(tmp_path):
    script("openpai.sh", tmp_path)


# --- Kubeflow -------------------------------------------------------------------------------------


def test_the_script_names_the_image_of_the_registry(tmp_path):
    for name in ("mpijob", "trainjob"):
        done = subprocess.run([EXAMPLES / "launch/kubeflow.sh", "host:5000/me", name], cwd=ROOT,
                              text=True, capture_output=True, check=True,
                              env={**os.environ, "KUBECTL": "cat"})
        images = re.findall(r"image: (\S+)", done.stdout)
        assert len(images) == 2 and set(images) == {"host:5000/me/horovod-c:1.0.0"}, images


def recipes():
    """The objects of deploy/kubeflow by kind."""
    found = [one for path in sorted((ROOT / "deploy/kubeflow").glob("*.yaml"))
             for one in yaml.safe_load_all(path.read_text())]
    return {one["kind"]: one for one in found}


def pods(kind):
    """The commands of an MPIJob or a TrainJob: of its launcher, and of a worker."""
    objects = recipes()
    if kind == "MPIJob":
        replicas = objects[kind]["spec"]["mpiReplicaSpecs"]
        return [replicas[role]["template"]["spec"]["containers"][0]["command"]
                for role in ("Launcher", "Worker")]
    runtime, job = objects["TrainingRuntime"], objects[kind]["spec"]
    assert job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    node, = [one for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]
             if one["name"] == "node"]
    return [job["trainer"]["command"],
            node["template"]["spec"]["template"]["spec"]["containers"][0]["command"]]


# What is given to ssh runs here.
SSH = """#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do
    case $1 in -[opiF]) shift ;; esac
    shift
done
echo "$1" >>"$SEEN"
shift
exec sh -c "$*"
"""


@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_the_launcher_of_kubeflow_starts_a_rank_on_each_worker(kind, tmp_path):
    """With the hostfile as the operators write it, and a stand-in for ssh and for the script."""
    hosts = [f"mnist-worker-{i}.mnist.default.svc" for i in range(2)]
    (tmp_path / "hostfile").write_text("".join(f"{host} slots=1\n" for host in hosts))
    for name, text in (("ssh", SSH), ("python", "#!/bin/sh\necho runs $1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    words = [str(tmp_path / "hostfile") if word == "/etc/mpi/hostfile" else word
             for word in pods(kind)[0]]
    assert str(tmp_path / "hostfile") in words and words[0] == "horovodrun"
    done = subprocess.run([BUILD / words[0], *words[1:]], text=True, capture_output=True,
                          timeout=120, env={**os.environ, "SEEN": str(tmp_path / "seen"),
                                            "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    started = re.findall(r"runs /horovod/(examples/\S+)", done.stdout)
    assert len(started) == 2 and (ROOT / started[0]).exists(), done.stdout
    assert set((tmp_path / "seen").read_text().split()) == set(hosts)


@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
def test_the_workers_of_kubeflow_run_an_sshd_that_takes_these_words(kind, tmp_path):
    key = tmp_path / "id_rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", key], check=True)
    command, *words = pods(kind)[1]
    assert command == "/usr/sbin/sshd" and "2222" in words
    words = [str(key) if word == "/home/horovod/.ssh/id_rsa" else word for word in words]
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    subprocess.run([command, "-t", *words], check=True)
    assert subprocess.run([command, "-t", *words, "-o", "NoSuchOption=1"],
                          capture_output=True).returncode != 0
