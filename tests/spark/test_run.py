# SPDX-License-Identifier: Apache-2.0
"""horovod.spark.run on real Spark: what comes back, what is printed, how it ends."""
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest
from conftest import pids_in, wait_until
from test_mpi import LOOPBACK

import horovod.spark
from horovod.runner.common.util.timeout import TimeoutException

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests


def hello(magic_number):
    from horovod import _core as hvd

    hvd.init([])
    print("Hello, rank = %d, local_rank = %d, size = %d, local_size = %d, magic_number = %d" % (
        hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), magic_number))
    rank = hvd.rank()
    hvd.shutdown()
    return rank


def sleep_long(folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(600)


def test_the_toy(spark, capsys):
    assert horovod.spark.run(hello, args=(42,)) == [0, 1, 2, 3]
    lines = capsys.readouterr().out.strip().split("\n")
    assert lines[0] == "Running 4 processes..."
    assert sorted(lines[1:]) == [
        f"Hello, rank = {rank}, local_rank = {rank}, size = 4, local_size = 4, magic_number = 42"
        for rank in range(4)]


def test_output_with_prefix(spark):
    out, err = io.StringIO(), io.StringIO()

    def fn():
        print("out")
        print("err", file=sys.stderr)

    horovod.spark.run(fn, num_proc=2, stdout=out, stderr=err, verbose=0)
    assert sorted(out.getvalue().split("\n")) == ["", "[0]<stdout>:out", "[1]<stdout>:out"]
    assert sorted(err.getvalue().split("\n")) == ["", "[0]<stderr>:err", "[1]<stderr>:err"]


def test_a_page_of_the_job(spark, tmp_path):
    out, err = io.StringIO(), io.StringIO()

    def watched():
        from horovod.common import basics as hvd

        hvd.init()
        for step in range(30):
            hvd.report(step=step, loss=1.0, samples=8)
            time.sleep(0.1)
        print("it goes well")

    horovod.spark.run(watched, num_proc=2, stdout=out, stderr=err, verbose=0, dashboard=True,
                      report=tmp_path / "page.html")
    assert "the job page is at http://127.0.0.1:" in err.getvalue()
    html = (tmp_path / "page.html").read_text()
    assert '"command":"horovod.spark.run(watched)"' in html
    assert '"ranks":2' in html and '"step":' in html and "it goes well" in html


def test_environment_and_arguments(spark):
    def fn(a, b=0):
        return a, b, os.environ.get("COLOUR"), "SPARK_REUSE_WORKER" in os.environ

    given = {"COLOUR": "blue", "SPARK_REUSE_WORKER": None}
    assert horovod.spark.run(fn, (1,), {"b": 2}, num_proc=1, env=given) == [(1, 2, "blue", False)]


def test_large_results(spark):
    results = horovod.spark.run(lambda: bytes(300 << 20), num_proc=2)
    assert [len(result) for result in results] == [300 << 20] * 2


def test_a_result_that_cannot_be_pickled(spark):
    with pytest.raises(RuntimeError, match="(?s)Process name: 0.*a generator that cannot be pickl"):
        horovod.spark.run(lambda: (x for x in ()), num_proc=1)


def test_large_arguments(spark):
    data = os.urandom(20 << 20)
    assert horovod.spark.run(lambda x: len(x), (data,), num_proc=2) == [20 << 20] * 2


def test_an_exception_ends_the_job(spark, ranks):
    def fn(folder):
        from horovod import _core as hvd

        hvd.init([])
        open(f"{folder}/{os.getpid()}", "w").close()
        if hvd.rank() == 1:
            with open(f"{folder}/struck", "w") as file:
                file.write(str(time.time()))
            raise ValueError("planted")
        time.sleep(600)

    with pytest.raises(RuntimeError, match="exited with non-zero status") as info:
        horovod.spark.run(fn, (ranks.folder,), num_proc=3)
    ranks.check_end()
    text = str(info.value)
    assert "Process name: 1\nExit code: 1\n" in text
    assert "in fn" in text and "ValueError: planted" in text  # the remote traceback
    assert horovod.spark.run(lambda: 1, num_proc=4) == [1] * 4  # all slots are free again


def test_a_killed_rank_is_the_cause(spark):
    def fn():
        from horovod import _core as hvd
        from horovod.common.exceptions import HorovodInternalError

        hvd.init([])
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(0.1)
            if hvd.health()[0] != "HVD_OK":
                raise HorovodInternalError(hvd.health()[1])

    with pytest.raises(RuntimeError, match="Process name: 1\nExit code: 137\n.*signal 9"):
        horovod.spark.run(fn, num_proc=2)


def test_too_few_slots(spark):
    began = time.monotonic()
    with pytest.raises(TimeoutException, match="^Timed out waiting for Spark tasks to start.") as e:
        horovod.spark.run(hello, (1,), num_proc=6, start_timeout=2)
    assert 2 <= time.monotonic() - began < 60
    assert "6 task slots are needed, but only 4 were found (spark.task.cpus=1" in str(e.value)


def test_a_function_that_does_not_start_in_time(spark, ranks):
    class Slow:
        """Unpickling it takes for ever, so the function never begins."""

        def __init__(self, folder):
            self.folder = folder

        def __reduce__(self):
            return sleep_long, (self.folder,)

    began = time.time()
    with pytest.raises(TimeoutException, match="have registered from .* and 0 run the function"):
        horovod.spark.run(print, (Slow(ranks.folder),), num_proc=2, start_timeout=12)
    with open(f"{ranks.folder}/struck", "w") as file:
        file.write(str(began + 12))
    ranks.check_end()


def test_cancelled_by_somebody_else(spark, ranks):
    def cancel():
        ranks.wait_for(2)
        ranks.strike()
        for number in range(200):
            spark.sparkContext.cancelJobGroup(f"horovod.spark.run.{number}")

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(RuntimeError, match="Spark job has failed"):
        horovod.spark.run(sleep_long, (ranks.folder,), num_proc=2)
    ranks.check_end()
    thread.join()


def test_no_context_no_run(sessions):
    sessions.stop()
    with pytest.raises(Exception, match="Could not find an active SparkContext"):
        horovod.spark.run(hello, (1,))


def test_arguments_that_cannot_be():
    with pytest.raises(ValueError, match="num_proc"):
        horovod.spark.run(hello, (1,), num_proc=0)
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        horovod.spark.walk


DRIVER = """
import json, os, sys, time
from pyspark.sql import SparkSession
import horovod.spark
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
def fn(folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(600)
try:
    horovod.spark.run(fn, (sys.argv[1],), **json.loads(sys.argv[2]))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    print(horovod.spark.run(lambda: 5), flush=True)
"""


def start_driver(ranks, **options):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, ranks.folder, json.dumps(options)],
                              stdout=subprocess.PIPE, text=True, start_new_session=True,
                              env={**os.environ, "HVD_TEST_JOB": ranks.folder})
    try:
        ranks.wait_for(2)
    except BaseException:
        driver.kill()
        raise
    return driver


def left_of_job(ranks):
    """Names of a driver and its descendants, whoever is their parent by now, by process id."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_ours = f"HVD_TEST_JOB={ranks.folder}".encode() in file.read().split(b"\0")
            with open(f"/proc/{pid}/comm") as file:
                if is_ours:
                    found[int(pid)] = file.read().strip()
        except OSError:
            pass  # it has ended, or is not ours
    return found


@pytest.mark.parametrize("options", [{}, {"use_mpi": True, "extra_mpi_args": LOOPBACK}],
                         ids=["plain", "mpi"])
def test_ctrl_c(ranks, options):
    driver = start_driver(ranks, **options)
    job = left_of_job(ranks)
    assert set(pids_in(ranks.folder)) <= set(job)
    assert ("mpirun" in job.values()) == ("use_mpi" in options)
    ranks.strike()
    driver.send_signal(signal.SIGINT)
    assert "interrupted\n" in iter(driver.stdout.readline, "")
    ranks.check_end()
    assert not {"mpirun", "orted", "prterun", "prted"} & set(left_of_job(ranks).values())
    out, _ = driver.communicate(timeout=120)
    assert "Running 2 processes...\n[5, 5]\n" in out
    wait_until(lambda: not left_of_job(ranks), 30)  # Spark itself takes a while


def test_a_killed_driver(ranks):
    driver = start_driver(ranks)
    ranks.strike()
    driver.kill()
    ranks.check_end()
    driver.wait()
