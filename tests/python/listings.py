# SPDX-License-Identifier: Apache-2.0
"""Whole scripts of the documentation, so that tests run what readers copy.

A listing of Python that begins with "# train.py" is one; a listing of kind diff is two, the script
before (what has a "-", and what has nothing in front) and the one after.
"""
import pathlib
import re
import subprocess
import sys

from horovod import _core

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOROVODRUN = pathlib.Path(_core.__file__).parents[2] / "horovodrun"


def _listings(page, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / page).read_text(), flags=re.M | re.S)


def whole_scripts(page):
    return [text for text in _listings(page, "python") if text.startswith("# train.py\n")]


def before_and_after(page):
    """The two scripts of the page's only diff."""
    lines = [line for text in _listings(page, "diff") for line in text.splitlines()]
    return ["".join(line[1:] + "\n" for line in lines if line[:1] in ("", " ", sign))
            for sign in ("-", "+")]


def run_script(text, folder, *launch, ranks=2, timeout_s=600):
    """What rank 0 prints; no other rank prints anything."""
    (folder / "train.py").write_text(text)
    words = [HOROVODRUN, *launch, "-np", str(ranks)] if ranks > 0 else []
    done = subprocess.run([*words, sys.executable, "train.py"], cwd=folder, timeout=timeout_s,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1]<stdout>" not in done.stdout, done.stdout
    return done.stdout


def losses(output):
    return [float(number) for number in re.findall(r"loss:? ([\d.]+)", output)]
