# SPDX-License-Identifier: Apache-2.0
"""horovod.run(): a function on ranks, from a program."""
import contextlib
import os
import subprocess
import sys
import threading

import pytest

import horovod
from horovod.runner.launch import find_launcher


def who():
    from horovod.common import basics as hvd

    hvd.init()
    answer = (hvd.rank(), hvd.size())
    hvd.shutdown()
    return answer


def test_the_dashboard_is_a_word_of_horovodrun():
    from horovod.runner import watching_words

    title = ["--title", "horovod.run(who)"]
    for dashboard, report, words in [
            (None, None, []), (False, None, []), (True, None, ["--dashboard"]),
            (8080, None, ["--dashboard=8080"]), (None, "/tmp/a.html", ["--report", "/tmp/a.html"])]:
        assert watching_words(dashboard, report, "horovod.run", who) == title + words


def test_results_come_by_rank():
    assert horovod.run(who, num_proc=3) == [(0, 3), (1, 3), (2, 3)]


def test_arguments_and_closures():
    factor = 7

    def multiply(a, b=0):
        return a * factor + b + int(os.environ["HOROVOD_RANK"])

    assert horovod.run(multiply, args=(2,), kwargs={"b": 100}, num_proc=2) == [114, 115]


def test_hosts_and_output(capsys):
    horovod.run(lambda: print("hello"), num_proc=2, hosts="localhost:1,127.0.0.1:1")
    out = capsys.readouterr().out
    assert sorted(out.splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]


def test_large_values():
    data = os.urandom(5_000_000)
    first, second = horovod.run(lambda: data + os.environ["HOROVOD_RANK"].encode(), num_proc=2)
    assert first == data + b"0" and second == data + b"1"


def test_exception_reaches_the_caller(capsys):
    def fail():
        if os.environ["HOROVOD_RANK"] == "1":
            raise KeyError("no such thing")

    with pytest.raises(RuntimeError) as caught:
        horovod.run(fail, num_proc=2)
    text = str(caught.value)
    assert text.startswith("Horovod detected that one or more processes exited with non-zero")
    assert "Process name: 1\nExit code: 1\n" in text
    assert "KeyError: 'no such thing'" in text and "in fail" in text
    assert "User function raise error: " in capsys.readouterr().err


def test_exit_code_is_told():
    with pytest.raises(RuntimeError, match="Process name: 0\nExit code: 9\n"):
        horovod.run(lambda: os._exit(9), num_proc=1)


def test_unpicklable_result_is_that_ranks_error():
    with pytest.raises(RuntimeError, match="result of this rank, of type lock, cannot be pickled"):
        horovod.run(threading.Lock, num_proc=1)


def test_failed_start_is_explained():
    with pytest.raises(RuntimeError, match="more processes .3. than there are available slots .1."):
        horovod.run(who, num_proc=3, hosts="localhost:1")


def test_wrong_arguments():
    with pytest.raises(ValueError):
        horovod.run(who, hosts="a:1", hostfile="f")
    with pytest.raises(ValueError):
        horovod.run(who, use_gloo=True, use_mpi=True)


def test_old_names_warn():
    with pytest.warns(DeprecationWarning, match="np is deprecated"):
        assert horovod.run(lambda: 1, np=2) == [1, 1]


def test_options_as_an_object(tmp_path):
    from horovod.runner import _HorovodArgs
    from horovod.runner.launch import _run

    args = _HorovodArgs()
    assert args.hosts is None and not hasattr(args, "__nothing__")
    args.num_proc, args.hosts, args.nics, args.cycle_time_ms = 2, "localhost:2", {"lo"}, 3
    args.verbose, args.use_gloo, args.use_mpi = False, True, None
    args.command = [sys.executable, "-c", "import os\nopen(os.environ['HOROVOD_RANK'] + "
                    "os.environ['HOROVOD_CYCLE_TIME'], 'w')"]
    with contextlib.chdir(tmp_path):
        assert _run(args) is None
    assert sorted(os.listdir(tmp_path)) == ["03", "13"]
    args.command = ["false"]
    with pytest.raises(RuntimeError, match="horovodrun failed with exit code 1"):
        _run(args)
    args.run_func = lambda: int(os.environ["HOROVOD_RANK"]) + 40
    assert _run(args) == [40, 41]


def test_console_command_is_horovodrun():
    code = "from horovod.runner.launch import run_commandline; run_commandline()"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True,
                          check=True)
    assert done.stdout == subprocess.run([find_launcher(), "--version"], capture_output=True,
                                         text=True, check=True).stdout


@pytest.mark.parametrize("module", ["horovod.runner.launch", "horovod.runner"])
def test_modules_are_horovodrun(module):
    command = [sys.executable, "-m", module]
    told = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert (told.stdout, told.stderr) == (f"{horovod.__version__}\n", "")
    ranks = subprocess.run([*command, "-np", "2", "sh", "-c", "echo $HOROVOD_RANK; exit 3"],
                           capture_output=True, text=True, check=False)
    assert ranks.returncode == 3 and "[0]<stdout>:0\n" in ranks.stdout


SCRIPT = '''"""Words."""
import sys

import horovod.common.basics as hvd


class Thing:
    pass


def main():
    hvd.init()
    import pickle
    assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
    print(hvd.rank(), __name__, __doc__, sys.argv, __file__, sys.path[0])
    hvd.shutdown()
    return {}


if __name__ == "__main__":
    sys.exit(main())
'''


def test_a_script(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format("0"))
    monkeypatch.chdir(tmp_path)
    assert horovod.run("train.py", args=["--lr", 0.1], num_proc=2) == [None, None]
    what = f"__main__ Words. ['train.py', '--lr', '0.1'] {script} {tmp_path}"
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"[{rank}]<stdout>:{rank} {what}" for rank in range(2)]
    script.write_text(SCRIPT.format("7"))
    with pytest.raises(RuntimeError, match="Exit code: 7"):
        horovod.run(script, num_proc=1)


def test_errors_of_a_script_name_its_line(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import os\nos.remove(__file__)  # as on a host that has not got it\n"
                      "def step():\n    raise KeyError('lost')\nstep()\n")
    with pytest.raises(RuntimeError) as caught:
        horovod.run(script, num_proc=1)
    assert f'File "{script}", line 4, in step\n    raise KeyError(\'lost\')\n' in str(caught.value)
    script.write_text("x = 1\nif x\n")
    with pytest.raises(SyntaxError) as wrong:
        horovod.run(script)
    assert (wrong.value.filename, wrong.value.lineno) == (str(script), 2)
    with pytest.raises(FileNotFoundError, match="nothing.py"):
        horovod.run("nothing.py")
    script.write_text("")
    for wrong in ({"kwargs": {"lr": 1}}, {"args": "--lr 1"}):
        with pytest.raises(TypeError, match="train.py"):
            horovod.run(script, **wrong)
