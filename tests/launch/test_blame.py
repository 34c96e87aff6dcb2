#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who is blamed when a job fails: the rank that caused it, in every run, however busy the machine.

Each way to fail is tried again and again beside processes that take all cores. One of them lets the
culprit's interpreter take long to end, so that the others always exit first.

Usage: test_blame.py BUILD-DIRECTORY [unittest arguments]
"""
import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from launching import BUILD, Case, main, run

# Eight let each rank of two and of four be the culprit; make test-long tries more often.
RUNS = int(os.environ.get("HVD_TEST_RUNS", "20" if "HVD_LONG" in os.environ else "8"))
CULPRIT_LINE = 17
WITH_PACKAGE = {**os.environ, "PYTHONPATH": str(BUILD / "python"), "OMP_NUM_THREADS": "1"}

# The failing statement stands in line CULPRIT_LINE.
SCRIPT = """\
import atexit
import os
import signal
import sys
import threading
import time

if "slow" in sys.argv:  # runs after hvd has left the job
    atexit.register(time.sleep, 0.7 if os.environ["HOROVOD_RANK"] == sys.argv[1] else 0)
from horovod.common import basics as hvd
from horovod.common.objects import allgather_object

hvd.init()
for step in range(5):
    allgather_object(step, name="step")
    if step == 3 and hvd.rank() == int(sys.argv[1]):
        {failure}
if "healthy" not in sys.argv:
    time.sleep(30)
"""

# Rank 0 gets what TensorFlow makes of an operation that failed.
GRAPH = """\
import time
from horovod.common import basics as hvd
from horovod.common.objects import allgather_object

class UnknownError(Exception):
    __module__ = "tensorflow.python"

hvd.init()
if hvd.rank() == 1:
    time.sleep(1)
    raise KeyError("mine")
try:
    allgather_object(1)
except Exception as error:
    raise UnknownError(f"Graph execution error:\\n\\nDetected at node n defined at:\\n  File a.py"
                       f"\\n\\nHorovodAllreduce: {error}\\n\\t [[{{{{node n}}}}]]")
"""

# name: statement, exit code, what the others and horovodrun say that the culprit did
FAILURES = {
    "exception": ("raise RuntimeError('my bug')", 1,
                  "raised RuntimeError: my bug (train.py:17)"),
    "exit": ("sys.exit(3)", 3, "left the job"),
    "finally": ("(lambda: [hvd.shutdown(), sys.exit(4)])()", 4, "left the job"),
    "os._exit": ("os._exit(5)", 5, None),
    "signal": ("os.kill(os.getpid(), signal.SIGKILL)", 137, None),
    "leaves early": ("break", 1, "left the job"),
}


@contextlib.contextmanager
def busy_machine():
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in range((os.cpu_count() or 1) + 1)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def fail_once(size, culprit, failure, *words):
    """(exit code, stderr) of a job."""
    with tempfile.TemporaryDirectory() as directory:
        script = SCRIPT.format(failure=failure)
        if failure == "break":  # and ends well, while the others do one more step
            script = script.replace("time.sleep(30)", "pass")
        pathlib.Path(directory, "train.py").write_text(script)
        done = subprocess.run(
            [BUILD / "horovodrun", "-np", str(size), sys.executable, "train.py", str(culprit),
             *words], cwd=directory, capture_output=True, text=True, timeout=120,
            env=WITH_PACKAGE)
    return done.returncode, done.stderr


class Blame(Case):
    def check(self, size, culprit, name, *words):
        failure, code, deed = FAILURES[name]
        returned, err = fail_once(size, culprit, failure, *words)
        with self.subTest(name=name, size=size, culprit=culprit, words=words):
            self.assertIn("horovodrun: the job failed", err)
            block = err[err.index("horovodrun: the job failed"):]
            self.assertIn(f"because of rank {culprit}: ", block, err)
            self.assertEqual(returned, code, err)
            self.assertNotIn("ended normally", err)
            self.assertLessEqual(block.count("\n"), 25)
            if deed is not None:
                self.assertIn(deed, block.split("\n")[0])
                others = [line for line in err.split("\n") if "HorovodInternalError" in line]
                self.assertTrue(others, err)
                for line in others:
                    self.assertRegex(line, rf"Rank {culprit} \(host [^)]*\) {re.escape(deed)}")

    def repeat(self, name, *words):
        with busy_machine():
            for i in range(RUNS):
                size = (2, 4)[i % 2]
                self.check(size, (i // 2 + 1) % size, name, *words)

    def test_exception(self):
        self.repeat("exception")

    def test_exception_of_a_rank_that_ends_slowly(self):
        self.repeat("exception", "slow")

    def test_sys_exit(self):
        self.repeat("exit", "slow")

    def test_os_exit(self):
        self.repeat("os._exit")

    def test_signal(self):
        self.repeat("signal")

    def test_shutdown_on_the_way_out(self):
        self.repeat("finally", "slow")

    def test_one_step_less(self):
        self.repeat("leaves early", "slow")


class Output(Case):
    """What is printed: one traceback, once."""

    def test_one_trace_once(self):
        # All others wait by then, and so say the same.
        _, err = fail_once(4, 2, "time.sleep(2); raise RuntimeError('my bug')", "slow")
        self.assertEqual(err.count("Traceback"), 1, err)
        self.assertEqual(len(re.findall(r"^\[2\]<stderr>:Traceback", err, re.M)), 1, err)
        self.assertEqual(len(re.findall(r"^\[0-1,3\]<stderr>:.*HorovodInternalError", err, re.M)),
                         1, err)
        self.assertNotIn("exit with status code", err)
        self.assertLess(err.count("\n"), 25, err)

    def test_equal_traces_are_folded(self):
        code = "import sys; print('fine', file=sys.stderr); raise ValueError('everywhere')"
        _, err = run("-np", 4, sys.executable, "-c", code, expect=1)
        self.assertEqual(err.count("<stderr>:fine"), 4)
        self.assertEqual(err.count("ValueError: everywhere"), 2, err)  # the other: in the block
        self.assertIn("  its last line on stderr:\n    | ValueError: everywhere\n", err)
        self.assertIn("[0-3]<stderr>:ValueError: everywhere", err)

    def test_a_rank_without_init_is_named(self):
        code = "from horovod.common import basics; basics.rank()"
        _, err = run("-np", 2, sys.executable, "-c", code, expect=1, env=WITH_PACKAGE)
        self.assertRegex(err, r"because of rank [01]: it raised NotInitializedError: Horovod has "
                              r"not been initialized; use hvd.init\(\)\.")
        self.assertNotIn("/common/basics.py", err)  # the traceback ends where the user called
        self.assertNotIn("    | ", err)

    def test_a_rank_that_fails_before_init_is_named(self):
        code = ("import os, time; from horovod.common import basics\n"
                "if os.environ['HOROVOD_RANK'] == '1': open('/no/data')\n"
                "time.sleep(20)")
        _, err = run("-np", 3, sys.executable, "-c", code, expect=1, env=WITH_PACKAGE)
        self.assertRegex(err, r"because of rank 1: it raised FileNotFoundError: .*'/no/data' ")

    def test_a_child_of_a_rank_is_not_the_rank(self):
        code = ("import multiprocessing\nfrom horovod.common import basics\n\n"
                "def child():\n    raise KeyError('mine')\n\n"
                "if __name__ == '__main__':\n"
                "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
                "    process.start(), process.join()\n"
                "    raise ValueError('all the same')\n")
        with tempfile.TemporaryDirectory() as directory:
            script = pathlib.Path(directory, "train.py")
            script.write_text(code)
            _, err = run("-np", 1, sys.executable, script, expect=1, env=WITH_PACKAGE)
        self.assertIn("KeyError: 'mine'", err)
        self.assertIn("because of rank 0: it raised ValueError: all the same", err)

    def test_a_loaders_worker_says_what_it_met(self):
        failure = ("raise OSError('Caught OSError in DataLoader worker process 0.\\n"
                   "Original Traceback (most recent call last):\\n  File x\\n"
                   "OSError: picture 40 is broken\\n')")
        _, err = fail_once(2, 1, failure)
        self.assertIn("it raised OSError: picture 40 is broken, in DataLoader worker process 0 "
                      "(train.py:17)", err)

    def test_a_rank_that_wrote_nothing_has_no_traceback_above(self):
        for failure, told in (("os._exit(5)", "look for what ends it with this exit code"),
                              ("raise KeyError(1)", "see the traceback above"),
                              ("sys.exit('no data')", "see what it wrote above")):
            _, err = fail_once(2, 1, failure)
            self.assertIn(f"what to try: {told}; ", err)

    def test_operations_that_fail_end_at_the_users_line(self):
        failure = "allgather_object(1)"
        for level, shows_all in (("warning", False), ("debug", True)):
            _, err = fail_once(2, 1, f"import os; os.environ['HOROVOD_LOG_LEVEL'] = '{level}'; "
                                     f"hvd.shutdown(); {failure}")
            self.assertIn("because of rank 1: it raised NotInitializedError", err)
            self.assertEqual("/common/objects.py" in err, shows_all, err)

    def test_calls_that_are_refused_end_at_the_users_line(self):
        refused = "hvd.start_timeline('/no/such/folder/t.json')"  # ValueError
        in_thread = f"t = threading.Thread(target=lambda: {refused}); t.start(); t.join(); 1 / 0"
        for failure in (refused, in_thread):
            _, err = fail_once(2, 1, failure)
            self.assertRegex(err, r"\[1\]<stderr>:ValueError: ")
            self.assertNotIn("/common/basics.py", err)
        self.assertIn("it raised ZeroDivisionError", err)
        _, err = fail_once(2, 1, f"raise ValueError('long ' * 100)")
        self.assertRegex(err, r"it raised ValueError: (long )+lo\.\.\. \(train.py:17\)")

    def test_a_graph_that_fails_in_consequence_says_one_line(self):
        _, err = run("-np", 2, sys.executable, "-c", GRAPH, expect=1, env=WITH_PACKAGE)
        self.assertIn("because of rank 1: it raised KeyError: 'mine'", err)
        self.assertRegex(err, r"\[0\]<stderr>:tensorflow\.python\.UnknownError: HorovodAllreduce: "
                              r"Horovod has been shut down\. Rank 1 .* raised KeyError: 'mine'")
        self.assertNotIn("Graph execution error", err)
        self.assertEqual(err.count("Traceback"), 1, err)

    def test_hooks_of_others_are_called(self):
        hook = ("raise_it = lambda: 1 / 0; sys.excepthook = "
                "lambda *what: print('my own hook', what[0].__name__, file=sys.stderr); raise_it()")
        code, err = fail_once(2, 1, hook)
        self.assertEqual(code, 1)
        self.assertIn("[1]<stderr>:my own hook ZeroDivisionError", err)
        self.assertIn("because of rank 1: it raised ZeroDivisionError: division by zero (train.py:"
                      f"{CULPRIT_LINE})", err)

    def test_threads(self):
        failure = ("threading.Thread(target=lambda: 1 / 0, name='loader').start(); "
                   "time.sleep(1); sys.exit(6)")
        code, err = fail_once(2, 1, failure)
        self.assertEqual(code, 6)
        self.assertIn("because of rank 1: it raised ZeroDivisionError: division by zero "
                      "(train.py:17) in thread 'loader'", err)


if __name__ == "__main__":
    main()
