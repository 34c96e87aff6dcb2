#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What timelines show of the (simulated) device: read as strictly as those of the CPU are.

Jobs are subtests of test_nccl and test_device, whose user's stream is held up for a while before
it has written the tensor: until then the device's rows show QUEUE, and what the device does ends
after the operation itself, which is over when all is queued.

Usage: test_device_timeline.py BUILD-DIRECTORY [unittest arguments]
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from decimal import Decimal

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "launch"))
from launching import BUILD, main  # noqa: E402
from test_timeline import check  # noqa: E402

TIMEOUT_S = 120
HELD_US = 10000  # at least so long the subtests hold up the user's stream
ROWS = {"NCCL": "NCCL_ALLREDUCE", "copies to the host": "COPY_TO_HOST",
        "copies to the device": "COPY_TO_DEVICE"}


def trace(program, subtest, schedule, *words):
    """The events of rank 0 of two."""
    # Not below /tmp: the ranks of these programs have one of their own.
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        path = pathlib.Path(folder, "trace.json")
        done = subprocess.run([BUILD / "tests" / program, "--only", subtest, "--ranks", "2",
                               "--layout", "one", "--env", f"HOROVOD_TIMELINE={path}", *words],
                              env=os.environ | {"GPUSIM_SCHEDULE": schedule, "GPUSIM_LAZY_MS": "5"},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stdout
        return json.loads(path.read_text(), parse_float=Decimal, parse_int=Decimal)


def spans_of(events, group, row=None):
    groups = {event["args"]["name"]: event["pid"] for event in events
              if event["name"] == "process_name"}
    rows = {(event["pid"], event["args"]["name"]): event["tid"] for event in events
            if event["name"] == "thread_name"}
    pid = groups.get(group)
    return [event for event in events if event["ph"] == "X" and event["pid"] == pid and
            (row is None or event["tid"] == rows[pid, row])]


def end(span):
    return span["ts"] + span["dur"]


class Timeline(unittest.TestCase):
    def check_row(self, events, row, n_held):
        self.assertEqual(check(events), [])
        work = [span for span in spans_of(events, "GPU", row) if span["name"] != "QUEUE"]
        waits = [span["dur"] for span in spans_of(events, "GPU", row) if span["name"] == "QUEUE"]
        self.assertEqual({span["name"] for span in work}, {ROWS[row]})
        if n_held > 0:
            self.assertGreaterEqual(len([us for us in waits if us >= HELD_US]), n_held)
        return work

    def test_nccl(self):
        for schedule in "random", "lazy":
            with self.subTest(schedule=schedule):
                events = trace("test_nccl", "host does not wait", schedule)
                work = self.check_row(events, "NCCL", 3)
                self.assertEqual([span["args"]["tensor"] for span in work], ["late"] * 4)
                self.assertEqual({span["args"]["bytes"] for span in work}, {400})
                operations = [span for span in spans_of(events, "tensors")
                              if span["name"] == "ALLREDUCE"]
                self.assertEqual(len(operations), 4)
                late = [end(there) - end(here) for there, here in zip(work, operations)]
                self.assertGreaterEqual(min(late[1:]), HELD_US)  # launched is not landed

    def test_through_the_host(self):
        events = trace("test_device", "host does not wait", "random", "--env",
                       "HOROVOD_GPU_OPERATIONS=HOST")
        copies = self.check_row(events, "copies to the host", 1)
        results = self.check_row(events, "copies to the device", 0)
        self.assertEqual(len(copies), len(results))
        self.assertEqual(spans_of(events, "GPU", "NCCL"), [])
        for copy, result in zip(copies, results):
            self.assertGreaterEqual(result["ts"], end(copy))


if __name__ == "__main__":
    main()
