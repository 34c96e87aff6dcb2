#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""hvd-info --gpu-selftest on the simulated GPU: right, with mistakes, and where there is none.

Usage: test_selftest.py BUILD-DIRECTORY [unittest arguments]
"""
import os
import pathlib
import re
import subprocess
import sys
import unittest

BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()
TIMEOUT_S = 200
TYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64",
         "bool", "bfloat16"]


def selftest(*words, **env):
    return subprocess.run([BUILD / "hvd-info", "--gpu-selftest", *words], timeout=TIMEOUT_S,
                          env=os.environ | env, stdout=subprocess.PIPE, text=True, check=False)


def ways(text):
    """What is told of each way: the cells by operation, and the other lines."""
    parts = {}
    for part in re.split(r"\n\n", text)[1:3]:
        name, *lines = part.splitlines()
        rows = {}
        for line in lines:
            cells = re.split(r"  +", line.strip())
            if len(cells) == 1 + len(TYPES):
                rows[cells[0]] = dict(zip(TYPES, cells[1:]))
        parts[name] = rows, lines
    return parts


class Selftest(unittest.TestCase):
    def test_right(self):
        for schedule, ranks in ("random", "3"), ("lazy", "2"):
            with self.subTest(schedule=schedule, ranks=ranks):
                run = selftest("--ranks", ranks, GPUSIM_DEVICES=ranks, GPUSIM_SCHEDULE=schedule,
                               GPUSIM_LAZY_MS="2", GPUSIM_DELAY_US="50")
                self.assertEqual(run.returncode, 0, run.stdout)
                self.assertRegex(
                    run.stdout, rf"All \d+ results are right, on each of {ranks} rank")
                self.assertIn("rank 1  GPU 1  Simulated GPU 1", run.stdout)
                self.assertNotIn("WRONG", run.stdout)
                by = ways(run.stdout)
                nccl, host = by["by NCCL"], by["through the host"]
                for rows, lines in nccl, host:
                    self.assertEqual(len(rows), 10)
                    self.assertEqual(set(rows["alltoall"].values()), {"ok"})
                    self.assertEqual(len([x for x in lines if "allreduce of" in x]), 4)
                self.assertEqual(nccl[0]["allreduce, sum"]["int16"], "-")
                self.assertEqual(host[0]["allreduce, sum"]["int16"], "ok")

    def test_wrong_result(self):
        run = selftest(GPUSIM_FAIL="nccl_wrong:40")
        self.assertEqual(run.returncode, 1, run.stdout)
        rows, lines = ways(run.stdout)["by NCCL"]
        self.assertEqual([cell for row in rows.values() for cell in row.values()].count("WRONG"), 1)
        told = [line for line in lines if "expected" in line]
        self.assertRegex(told[0], r"(allreduce, \w+|\w+) of \w+, \d+ elements?: rank 0: "
                                  r"element \d+ is \d+, expected \d+")
        self.assertIn("Something is wrong", run.stdout)

    def test_broken_collective(self):
        run = selftest(GPUSIM_FAIL="nccl_kernel:40")
        self.assertEqual(run.returncode, 1, run.stdout)
        _, lines = ways(run.stdout)["by NCCL"]
        self.assertTrue(any("NCCL error 6" in line for line in lines), run.stdout)
        rows, _ = ways(run.stdout)["through the host"]  # the other way is tried all the same
        self.assertEqual(set(rows["broadcast"].values()), {"ok"})

    def test_one_gpu(self):
        run = selftest(GPUSIM_DEVICES="1")
        self.assertEqual(run.returncode, 0, run.stdout)
        self.assertRegex(run.stdout, "by NCCL\n  not tried: rank 0 .* use the same GPU")

    def test_none(self):
        for env in {"GPUSIM_DEVICES": "0"}, {"LD_LIBRARY_PATH": ""}:
            with self.subTest(env=env):
                run = selftest(**env)
                self.assertEqual(run.returncode, 3, run.stdout)
                self.assertRegex(run.stdout, "^There is no GPU to test on this machine: .*driver")
                self.assertEqual(len(run.stdout.splitlines()), 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
