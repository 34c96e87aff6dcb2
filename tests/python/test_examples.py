# SPDX-License-Identifier: Apache-2.0
"""Examples of no framework: the notebook, scripts for launchers; the list of them all."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

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
