# SPDX-License-Identifier: Apache-2.0
"""Rows per second of horovod.spark.data.ParquetReader, beside petastorm where that still works.

Like is compared with like where the batches are row groups in order; petastorm makes no others.

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

ROW_GROUP = 32768

OURS = '''
import sys, time
from horovod.spark.data import ParquetReader
began, used = time.monotonic(), time.process_time()
reader = ParquetReader(sys.argv[1], batch_size=int(sys.argv[2]), n_shards=4,
                       shuffle=sys.argv[3] == "mixed")
rows = sum(len(batch["c0"]) for batch in reader.epoch())
print(rows / (time.monotonic() - began), rows / (time.process_time() - used))
'''
THEIRS = '''
import sys, time, warnings
warnings.simplefilter("ignore")
from petastorm import make_batch_reader
began, used = time.monotonic(), time.process_time()
with make_batch_reader("file://" + sys.argv[1], cur_shard=0, shard_count=4, num_epochs=1,
                       reader_pool_type=sys.argv[2], workers_count=int(sys.argv[3]),
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
                               row_group_size=ROW_GROUP, compression="snappy")


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--petastorm", help="the Python of an environment that has petastorm")
    options.add_argument("--rows", type=int, default=2097152)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    runs = {}  # name -> threads, interpreter, code, its arguments
    for threads in (1, 2):
        for order, batch in (("in order", ROW_GROUP), ("in order", 1024), ("mixed", 1024)):
            runs[f"ParquetReader, {order}, batches of {batch}, {threads} threads"] = (
                threads, sys.executable, OURS, str(batch), order)
    if args.petastorm:
        runs["petastorm, row groups, no pool"] = (1, args.petastorm, THEIRS, "dummy", "1")
        runs["petastorm, row groups, 2 threads"] = (2, args.petastorm, THEIRS, "thread", "2")
    else:
        print("without --petastorm: only our own figures")
    rates = {name: [] for name in runs}  # (per second, per second of processor time)
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args.rows)
        for _ in range(args.rounds):
            for name, (threads, python, code, *options) in runs.items():
                out = subprocess.run([python, "-c", code, folder, *options], check=True, text=True,
                                     env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                                     stdout=subprocess.PIPE).stdout
                rates[name].append([float(word) / 1e6 for word in out.split()[-2:]])
    print("\n| reader | million rows/s, median | least | most | per CPU s |\n"
          "|---|---|---|---|---|")
    for name, values in rates.items():
        walls, processor = zip(*values)
        print(f"| {name} | {statistics.median(walls):.2f} | {min(walls):.2f} | {max(walls):.2f} | "
              f"{statistics.median(processor):.2f} |")


if __name__ == "__main__":
    main()
