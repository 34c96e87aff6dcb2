# SPDX-License-Identifier: Apache-2.0
"""The picture of the documentation: 16 ranks on four hosts of four slots, on a real cluster."""
import os
import subprocess

import hosts
import pytest

DRIVER = '''
import os, sys, time
from pyspark.sql import SparkSession
import horovod.spark

spark = (SparkSession.builder.master("spark://spark0:7077").config("spark.ui.enabled", "false")
         .config("spark.driver.host", "spark0").config("spark.executor.memory", "512m")
         .config("spark.ui.showConsoleProgress", "false").getOrCreate())
spark.sparkContext.setLogLevel("OFF")

def fn(magic_number):
    import socket
    from horovod import _core as hvd
    hvd.init([])
    print("Hello, rank = %d, local_rank = %d, size = %d, local_size = %d, magic_number = %d" % (
        hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), magic_number))
    result = hvd.rank(), hvd.cross_rank(), hvd.cross_size(), socket.gethostname()
    hvd.shutdown()
    return result

print(horovod.spark.run(fn, args=(42,)))
began = time.monotonic()
try:
    horovod.spark.run(fn, args=(1,), num_proc=20, start_timeout=10)
except Exception as error:
    print("refused:", error)
print(time.monotonic() - began)

def with_mpi():
    import socket
    from horovod import _core as hvd
    hvd.init([])
    result = hvd.rank(), int(os.environ["OMPI_COMM_WORLD_RANK"]), socket.gethostname()
    hvd.shutdown()
    return result

print(horovod.spark.run(with_mpi, num_proc=4, use_mpi=True, verbose=0))
'''


@pytest.fixture
def cluster():
    if os.geteuid() != 0:
        pytest.fail("network namespaces need root")
    made = hosts.Cluster(4, 4)
    yield made
    made.close()
    left = subprocess.run(["ip", "netns", "list"], stdout=subprocess.PIPE, text=True).stdout
    assert hosts.PREFIX not in left


def test_sixteen_ranks_on_four_hosts(cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    cluster.wait_for_workers()
    lines = cluster.run_driver(str(script)).strip().split("\n")
    if lines[0].startswith("Waiting for executors: "):  # of a machine that is busy
        lines.pop(0)
    assert lines[0] == "Running 16 processes on 4 hosts..."
    assert sorted(lines[1:17]) == sorted(
        f"Hello, rank = {rank}, local_rank = {rank % 4}, size = 16, local_size = 4, "
        "magic_number = 42" for rank in range(16))
    seen = eval(lines[17])
    assert [rank for rank, _, _, _ in seen] == list(range(16))
    assert all(cross == (rank // 4, 4) for rank, *cross, _ in seen for cross in [tuple(cross)])
    assert len({name for *_, name in seen}) == 4
    for first in range(0, 16, 4):  # four neighbours share a host
        assert len({name for *_, name in seen[first:first + 4]}) == 1
    assert lines[18] == "Running 20 processes..."
    assert lines[19].startswith("refused: Timed out waiting for Spark tasks to start. 20 task "
                                "slots are needed, but only 16 were found")
    assert 10 <= float(lines[20]) < 40  # 10 s were given; the machine may be busy
    seen = eval(lines[21])  # mpirun's daemons have been started on all hosts
    assert [(rank, theirs) for rank, theirs, _ in seen] == [(rank, rank) for rank in range(4)]
    assert len({name for *_, name in seen}) == 4
