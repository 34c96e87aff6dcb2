# SPDX-License-Identifier: Apache-2.0
"""run() through Spark Connect: a client without a SparkContext, in a process of its own."""
import glob
import os
import signal
import subprocess
import sys

START = '''
import os, sys, threading, time
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote("local[4]").getOrCreate()
import horovod.spark
'''

CLIENT = START + '''

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
    time.sleep(600)

try:
    horovod.spark.run(bad, num_proc=2)
except RuntimeError as error:
    print("failed:", "Process name: 1" in str(error), "ValueError: planted" in str(error))
try:
    horovod.spark.run(fn, args=(1,), num_proc=6, start_timeout=3)
except Exception as error:
    print("refused:", error)
def sleep_long(batches):
    time.sleep(600)
    yield from batches

busy = threading.Thread(target=lambda: spark.range(0, 4, 1, 4).mapInArrow(
    sleep_long, "id long").collect(), daemon=True)
busy.start()
time.sleep(5)
began = time.monotonic()
try:
    horovod.spark.run(fn, args=(1,), num_proc=2, start_timeout=3)  # no slot to count them in
except Exception as error:
    print("late:", time.monotonic() - began < 60, error)
spark.interruptAll()
time.sleep(5)
busy = threading.Thread(target=lambda: spark.range(0, 3, 1, 3).mapInArrow(
    sleep_long, "id long").collect(), daemon=True)
busy.start()
time.sleep(5)
try:
    horovod.spark.run(fn, args=(1,), num_proc=2, start_timeout=20)  # one slot, not two
except Exception as error:
    print("not begun:", error)
spark.interruptAll()

print("by default:", len(horovod.spark.run(lambda: 1)))
print("secret:", horovod.spark.run(lambda: open(os.environ["HOROVOD_SECRET_FILE"]).read())[0])
spark.stop()
'''

INTERRUPTED = START + '''
def fn(folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(600)

try:
    horovod.spark.run(fn, args=(sys.argv[1],), num_proc=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    print(horovod.spark.run(lambda: 5, num_proc=4), flush=True)
'''


def start(tmp_path, code, *args):
    script = tmp_path / "client.py"
    script.write_text(code)
    (tmp_path / "events").mkdir()
    (tmp_path / "spark-defaults.conf").write_text(  # what the server, not the client, decides
        f"spark.eventLog.enabled true\nspark.eventLog.dir file://{tmp_path}/events\n"
        "spark.eventLog.compress false\n")
    return subprocess.Popen([sys.executable, str(script), *args], text=True,
                            stdout=subprocess.PIPE,
                            env={**os.environ, "SPARK_CONF_DIR": str(tmp_path)})


def test_connect(tmp_path):
    out, _ = start(tmp_path, CLIENT).communicate(timeout=1800)
    lines = out.strip().split("\n")
    first = lines.index("Running 4 processes...")
    assert sorted(lines[first + 1:first + 5]) == [f"rank {rank} of 4" for rank in range(4)]
    assert f"{[(rank, 42, 3 << 20) for rank in range(4)]}" in lines
    assert "by default: 4" in lines
    assert any(line.startswith("refused: Timed out waiting for Spark tasks to start. 6 task slots "
                               "are needed, but only 4 were found") for line in lines)
    assert "failed: True True" in lines
    assert any(line.startswith("late: True Timed out waiting for Spark tasks to start. Spark "
                               "could not count its task slots") for line in lines)
    assert any(line.startswith("not begun: Timed out waiting for Spark tasks to start. Spark has "
                               "not started the 2 tasks") for line in lines)
    check_log(tmp_path / "events", lines[-1].removeprefix("secret: "))


def check_log(folder, secret):
    """The secret is not in what Spark keeps about its jobs."""
    assert len(secret) == 64
    texts = [open(path, "rb").read() for path in glob.glob(f"{folder}/**", recursive=True)
             if os.path.isfile(path)]
    assert any(b"SparkListenerJobStart" in text for text in texts)
    for text in texts:
        assert secret.encode() not in text and bytes.fromhex(secret) not in text


def test_ctrl_c(tmp_path, ranks):
    client = start(tmp_path, INTERRUPTED, ranks.folder)
    try:
        ranks.wait_for(2)
        ranks.strike()
        client.send_signal(signal.SIGINT)
        ranks.check_end()
        out, _ = client.communicate(timeout=300)
    finally:
        client.kill()
    assert "interrupted\nRunning 4 processes...\n[5, 5, 5, 5]\n" in out
