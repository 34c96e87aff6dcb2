# SPDX-License-Identifier: Apache-2.0
"""run() through Spark Connect: a client without a SparkContext, in a process of its own."""
import subprocess
import sys

CLIENT = '''
import os, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote("local[4]").getOrCreate()
import horovod.spark

def fn(x):
    from horovod import _core as hvd
    hvd.init([])
    print("rank", hvd.rank(), "of", hvd.size())
    rank = hvd.rank()
    hvd.shutdown()
    return rank, x, os.urandom(3 << 20)

print([(rank, x, len(data)) for rank, x, data in horovod.spark.run(fn, args=(42,), num_proc=4)])

def bad():
    if os.environ["HOROVOD_RANK"] == "1":
        raise ValueError("planted")
    import time
    time.sleep(600)

try:
    horovod.spark.run(bad, num_proc=2)
except RuntimeError as error:
    print("failed:", "Process name: 1" in str(error), "ValueError: planted" in str(error))
try:
    horovod.spark.run(fn, args=(1,), num_proc=6, start_timeout=3)
except Exception as error:
    print("refused:", error)
print("by default:", len(horovod.spark.run(lambda: 1)))
'''


def test_connect(tmp_path):
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    out = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
                         timeout=1800, check=True).stdout
    lines = out.strip().split("\n")
    first = lines.index("Running 4 processes...")
    assert sorted(lines[first + 1:first + 5]) == [f"rank {rank} of 4" for rank in range(4)]
    assert f"{[(rank, 42, 3 << 20) for rank in range(4)]}" in lines
    assert "by default: 4" in lines
    assert any(line.startswith("refused: Timed out waiting for Spark tasks to start. 6 task slots "
                               "are needed and 4 were found") for line in lines)
    assert "failed: True True" in lines
