#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The timeline of a job, read as strictly as Perfetto's importer reads it.

Perfetto puts a span below another only if it ends no later; what overlaps is an import error, and
so is an end without a beginning. Here times are compared as the decimal numbers of the file.

Usage: test_timeline.py BUILD-DIRECTORY [unittest arguments]
"""
import json
import pathlib
import subprocess
import sys
import tempfile
from decimal import Decimal

from launching import BUILD, Case, main, run

SOURCE = pathlib.Path(__file__).resolve().parents[2]

TRAIN = """
import array, time
from horovod import _core
from horovod.common import basics as hvd

hvd.init()

def submit(name, n):
    data = array.array("f", [1.0] * n)
    return _core.submit(op=_core.ALLREDUCE, name=name, dtype=_core.FLOAT32, inputs=data,
                        outputs=data, result=data)

for step in range(60):
    time.sleep(0.002 * (1 + hvd.rank()))
    for handle in [submit(f"allreduce.grad.{i}", 10 ** (i % 6)) for i in range(12)]:
        handle.wait()
"""


def check(events):
    """What is wrong with them, in sentences."""
    tracks, named, problems = {}, set(), []
    for event in events:
        kind, track = event["ph"], (event.get("pid"), event.get("tid"))
        if kind == "M":
            named.add(track if event["name"] == "thread_name" else (event["pid"], None))
            continue
        if kind not in ("X", "i"):
            problems.append(f"event of kind {kind!r}: {event}")
        if None in track:
            problems.append(f"event without a track: {event}")
        if kind == "X":
            tracks.setdefault(track, []).append((event["ts"], event["ts"] + event["dur"],
                                                 event["name"]))
        elif not event.get("name", "0").replace("_", "").replace(" ", "").isalnum() or \
                event["name"].isdigit():
            problems.append(f"a mark without a name: {event}")
    for track, spans in tracks.items():
        if track not in named or (track[0], None) not in named:
            problems.append(f"track {track} has no name")
        open_ends = []
        for begin, end, name in spans:  # as they come: Perfetto sorts by time only, and stably
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if open_ends and end > open_ends[-1]:
                problems.append(f"{name} of track {track} ends at {end}, {end - open_ends[-1]} "
                                "after what it is in")
            open_ends.append(end)
        begins = [begin for begin, _, _ in spans]
        if begins != sorted(begins):
            problems.append(f"the spans of track {track} are not in order")
    return problems


class Timeline(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = pathlib.Path(cls.folder.name, "trace.json")
        run("-np", 2, "--timeline-filename", cls.path, "--timeline-mark-cycles", sys.executable,
            "-c", TRAIN, env={"PYTHONPATH": str(BUILD / "python")})
        cls.events = json.loads(cls.path.read_text(), parse_float=Decimal, parse_int=Decimal)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()
        super().tearDownClass()

    def test_spans_nest(self):
        self.assertEqual(check(self.events), [])

    def test_what_is_on_it(self):
        names = [event["name"] for event in self.events]
        groups = {event["args"]["name"]: int(event["pid"]) for event in self.events
                  if event["name"] == "process_name"}
        self.assertEqual(groups, {"rank 0": 0, "tensors": 1, "ranks": 2})
        self.assertEqual(names.count("NEGOTIATE_ALLREDUCE"), 60 * 12)
        self.assertEqual(names.count("ALLREDUCE"), 60 * 12)
        self.assertGreater(names.count("rank 1 ready"), 60)
        self.assertIn("CYCLE_START", names)
        rows = {event["args"]["name"] for event in self.events if event["name"] == "thread_name"}
        self.assertLessEqual({"program", "allreduce.grad.0", "allreduce.grad.11", "rank 1"}, rows)

    def test_compute_is_what_the_program_does_between(self):
        spans = [event["dur"] for event in self.events if event["name"] == "COMPUTE"]
        self.assertGreaterEqual(sum(spans), 50 * 2000)  # microseconds: it slept that long at least

    def test_the_checker_finds_what_is_wrong(self):
        good = {"name": "A", "ph": "X", "ts": Decimal(1), "dur": Decimal(5), "pid": 1, "tid": 1}
        named = [{"name": "thread_name", "ph": "M", "pid": 1, "tid": 1},
                 {"name": "process_name", "ph": "M", "pid": 1}]
        self.assertEqual(check([*named, good, {**good, "ts": Decimal(2), "dur": Decimal(4)}]), [])
        for wrong in [{**good, "ph": "B"}, {**good, "ts": Decimal(3)}, {**good, "tid": 2},
                      {**good, "name": "1", "ph": "i"}, {**good, "ts": Decimal(0)},
                      {**good, "ts": Decimal(2), "dur": Decimal("4.001")}]:
            self.assertEqual(len(check([*named, good, wrong])), 1, wrong)

    def test_picture_without_a_choice_of_time(self):
        picture = pathlib.Path(self.folder.name, "trace.svg")
        subprocess.run([sys.executable, SOURCE / "bench" / "draw_timeline.py", self.path, "--out",
                        picture], check=True)
        text = picture.read_text()
        self.assertIn("allreduce.grad.11", text)
        self.assertGreater(text.count("<title>rank 1"), 12)
        widths = [float(part.split('"')[0]) for part in text.split('width="')[2:]]
        self.assertGreater(max(widths[1:]), 5)  # bars, not hairs


if __name__ == "__main__":
    main()
