# SPDX-License-Identifier: Apache-2.0
"""Sessions for the tests that need Spark: one application at a time, made by its settings."""
import os
import stat
import sys
import time

import pytest

try:
    import pyspark
except ImportError:  # what needs no Spark is to be tested without it
    pyspark = None

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

COMMON = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false",
          "spark.driver.memory": "1g"}


if pyspark is not None and int(pyspark.__version__.split(".")[0]) < 4:
    collect_ignore = ["test_connect.py"]  # the package does not have Connect's server before 4.0


class Sessions:
    """Keeps the application while the same one is asked for."""

    def __init__(self):
        self._key = None
        self._spark = None

    def get(self, master="local[4]", **conf):
        from pyspark.sql import SparkSession

        conf = {key.replace("__", "."): value for key, value in conf.items()}
        key = (master, tuple(sorted(conf.items())))
        if key != self._key:
            self.stop()
            if master.startswith("local-cluster"):
                import pyspark

                os.environ["SPARK_HOME"] = os.path.dirname(pyspark.__file__)
            builder = SparkSession.builder.master(master).appName("horovod tests")
            for name, value in {**COMMON, **conf}.items():
                builder = builder.config(name, value)
            self._spark = builder.getOrCreate()
            self._spark.sparkContext.setLogLevel("OFF")
            self._key = key
        return self._spark

    def stop(self):
        if self._spark is not None:
            self._spark.stop()
        self._spark = self._key = None


@pytest.fixture(scope="session")
def sessions():
    kept = Sessions()
    yield kept
    kept.stop()


@pytest.fixture
def spark(sessions):
    return sessions.get()


@pytest.fixture
def gpu_script(tmp_path):
    """What Spark calls to find out about GPUs: four of them."""
    script = tmp_path / "gpus.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1", "2", "3"]}\'\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def patience(seconds=5.0):
    """A job promises to be over 5 s after whatever ends it. So it is on a machine that is not
    overrun; on one that is, everything takes so many times longer."""
    return seconds * max(1.0, os.getloadavg()[0] / (2 * os.cpu_count()))


def pids_in(folder):
    """Process ids of the ranks that have said so."""
    return [int(name) for name in os.listdir(folder) if name.isdigit()]


@pytest.fixture
def ranks(tmp_path):
    """A folder ranks leave their process ids in, and questions about it."""
    class Ranks:
        folder = str(tmp_path)

        def wait_for(self, n):
            wait_until(lambda: len(pids_in(self.folder)) >= n)

        def strike(self):
            """Now the job is to end. A rank may write the file itself."""
            with open(f"{self.folder}/struck", "w") as file:
                file.write(str(time.time()))

        def check_end(self):
            """All ranks are gone, soon enough after the strike; and run() too, if called then."""
            assert pids_in(self.folder)
            with open(f"{self.folder}/struck") as file:
                struck = float(file.read())
            wait_until(lambda: all(is_gone(pid) for pid in pids_in(self.folder)), 120)
            seconds = time.time() - struck
            print(f"over after {seconds:.1f} s, load {os.getloadavg()[0]:.0f}")
            assert seconds < patience()

    return Ranks()
