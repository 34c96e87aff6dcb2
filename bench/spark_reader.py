# SPDX-License-Identifier: Apache-2.0
"""Rows per second of horovod.spark.data.ParquetReader, beside petastorm where that still works.

    .venv/bin/python bench/spark_reader.py [--petastorm PYTHON] [--rows 2097152]

petastorm 0.13.1 is the last release and needs old companions, in an environment of its own:

    python3 -m venv old && old/bin/pip install petastorm==0.13.1 pyarrow==12.0.1 'numpy<2' \
        'pandas<2.1' pyspark==3.5.9 setuptools

The data: 38 columns (18 int32, 20 float32), 16 files, row groups of 32768 rows, snappy. Read is
shard 0 of 4, each time by a new process that measures after its imports. Contenders take turns.
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile

OURS = '''
import sys, time
from horovod.spark.data import ParquetReader
began, used = time.monotonic(), time.process_time()
reader = ParquetReader(sys.argv[1], batch_size=1024, n_shards=4, shuffle=sys.argv[2] == "1")
rows = sum(len(batch["c0"]) for batch in reader.epoch())
print(rows / (time.monotonic() - began), rows / (time.process_time() - used))
'''
THEIRS = '''
import sys, time, warnings
warnings.simplefilter("ignore")
from petastorm import make_batch_reader
began, used = time.monotonic(), time.process_time()
with make_batch_reader("file://" + sys.argv[1], cur_shard=0, shard_count=4, num_epochs=1,
                       reader_pool_type=sys.argv[2], workers_count=2,
                       shuffle_row_groups=True) as reader:
    rows = sum(len(batch.c0) for batch in reader)
print(rows / (time.monotonic() - began), rows / (time.process_time() - used))
'''


def make(folder, n_rows):
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet

    rng = np.random.default_rng(1)
    n = n_rows // 16
    for number in range(16):
        table = {f"c{i}": rng.integers(0, 1000, n, dtype=np.int32) for i in range(18)}
        table.update({f"c{i}": rng.random(n, dtype=np.float32) for i in range(18, 38)})
        pa.parquet.write_table(pa.table(table), f"{folder}/part-{number:02}.parquet",
                               row_group_size=32768, compression="snappy")


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--petastorm", help="the Python of an environment that has petastorm")
    options.add_argument("--rows", type=int, default=2097152)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    runs = {"ParquetReader, shuffled, batches of 1024": (sys.executable, OURS, "1"),
            "ParquetReader, in order, batches of 1024": (sys.executable, OURS, "0")}
    if args.petastorm:
        runs["petastorm, no pool, row groups"] = (args.petastorm, THEIRS, "dummy")
        runs["petastorm, 2 threads, row groups"] = (args.petastorm, THEIRS, "thread")
    else:
        print("without --petastorm: only our own figures")
    rates = {name: [] for name in runs}  # (per second, per second of processor time)
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args.rows)
        for _ in range(args.rounds):
            for name, (python, code, option) in runs.items():
                out = subprocess.run([python, "-c", code, folder, option], check=True,
                                     stdout=subprocess.PIPE, text=True).stdout
                rates[name].append([float(word) / 1e6 for word in out.split()[-2:]])
    print("\n| reader | million rows/s, median | least | most | per CPU s |\n"
          "|---|---|---|---|---|")
    for name, values in rates.items():
        walls, processor = zip(*values)
        print(f"| {name} | {statistics.median(walls):.2f} | {min(walls):.2f} | {max(walls):.2f} | "
              f"{statistics.median(processor):.2f} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
