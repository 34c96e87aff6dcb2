# SPDX-License-Identifier: Apache-2.0
"""horovod.spark.run with a file in the place of a function, on real Spark."""
import io

import pytest

import horovod.spark

SCRIPT = """import os
import sys

from horovod import _core as hvd

if os.path.exists(__file__):
    os.rename(__file__, __file__ + ".gone")  # as on executors that have not got it
assert __name__ == "__main__" and sys.modules["__main__"].hvd is hvd
hvd.init([])
print(hvd.rank(), sys.argv, sys.path[0])
hvd.shutdown()
sys.exit()
"""


def test_a_script_runs_on_every_rank(spark, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    results = horovod.spark.run("train.py", args=["--epochs", 3], num_proc=1, stdout=out, verbose=0)
    assert results == [None]
    assert out.getvalue() == f"[0]<stdout>:0 ['train.py', '--epochs', '3'] {tmp_path}\n"
    assert (tmp_path / "train.py.gone").exists()


def test_all_ranks_have_it(spark, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("os.rename", "str.join"))
    assert horovod.spark.run(script, num_proc=3, verbose=0) == [None] * 3


def test_errors_name_file_and_line(spark, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("def step():\n    raise KeyError('lost')\n\n\nstep()\n")
    with pytest.raises(RuntimeError) as caught:
        horovod.spark.run(script, num_proc=2, verbose=0)
    assert f'File "{script}", line 2, in step\n    raise KeyError(\'lost\')\n' in str(caught.value)
    script.write_text("import sys\nsys.exit(7)\n")
    with pytest.raises(RuntimeError, match="Exit code: 7"):
        horovod.spark.run(script, num_proc=1, verbose=0)


def test_what_cannot_be_run_is_the_callers_error(spark, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("x = 1\nif x\n")
    with pytest.raises(SyntaxError) as caught:
        horovod.spark.run(script)
    assert (caught.value.filename, caught.value.lineno) == (str(script), 2)
    with pytest.raises(FileNotFoundError, match="nothing.py"):
        horovod.spark.run(str(tmp_path / "nothing.py"))
