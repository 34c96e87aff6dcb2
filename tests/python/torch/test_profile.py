# SPDX-License-Identifier: Apache-2.0
"""hvd.profile(): one file of all ranks on one clock; and the ranges that profilers see."""
import gzip
import json
import subprocess

from ranks import run_ranks

FAKE_NVTX = """
#include <stdio.h>
#include <stdlib.h>
static void note(const char *text)
{
    FILE *file = fopen(getenv("FAKE_NVTX_LOG"), "a");
    fprintf(file, "%s\\n", text);
    fclose(file);
}
int nvtxRangePushA(const char *text) { note(text); return 0; }
int nvtxRangePop(void) { note("pop"); return 0; }
"""
NVTX = {"NVTX_INJECTION64_PATH": "/nowhere"}


def rows(events):
    """{name of a group of rows: its events}"""
    names = {event["pid"]: event["args"]["name"] for event in events
             if event["name"] == "process_name"}
    return {name: [event for event in events if event["pid"] == pid and event["ph"] == "X"]
            for pid, name in names.items()}


def test_one_file_of_all_ranks_on_one_clock(tmp_path):
    path = tmp_path / "trace.json"
    run_ranks(2, "torch/profile_suite", "profiled", str(path), hosts=2)
    events = json.loads(path.read_text())["traceEvents"]
    assert min(event["ts"] for event in events if "ts" in event) >= 0
    groups = rows(events)
    for rank in range(2):
        named = [event["name"] for event in groups[f"rank {rank}: operations"]]
        assert named.count("NEGOTIATE_ALLREDUCE") >= 3 * 4  # x, weight and bias
        python = groups[f"rank {rank}: python"]
        assert any("load_slowly" in event["name"] for event in python)
        submits = sorted(event["ts"] for event in python
                         if event["name"] == "horovod.submit allreduce allreduce.x")
        assert len(submits) == 4
        track = next(event["tid"] for event in events if event["name"] == "thread_name"
                     and event["args"]["name"] == "allreduce.x"
                     and event["pid"] // 1000 == rank)
        begun = sorted((event["ts"], event["dur"])
                       for event in groups[f"rank {rank}: operations"]
                       if event["tid"] == track and event["name"] == "NEGOTIATE_ALLREDUCE")
        # Two clocks of one rank, one of them PyTorch's: a busy machine may part some, not all.
        assert min(abs(a - b[0]) for a, b in zip(submits, begun)) < 1000
        if rank == 0:  # the other was late
            assert max(dur for _, dur in begun) > 20e3


def test_an_error_inside_is_the_program_s_own(tmp_path):
    path = tmp_path / "trace.json"
    assert run_ranks(2, "torch/profile_suite", "left_by_an_error", str(path)) == [2.0, 2.0]
    assert not path.exists()
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]


def test_not_beside_a_timeline(tmp_path):
    said = run_ranks(1, "torch/profile_suite", "beside_a_timeline", str(tmp_path / "trace.json"),
                     env={"HOROVOD_TIMELINE": str(tmp_path / "timeline.json")})
    assert "a timeline is being written already" in said[0]


def test_torch_sees_submissions_and_waits():
    names = run_ranks(2, "torch/profile_suite", "seen_by_torch")[0]
    assert "horovod.submit allreduce allreduce.x" in names
    assert "horovod.wait allreduce" in names


def test_nvtx_is_told_where_its_library_is(tmp_path):
    source, log = tmp_path / "nvtx.c", tmp_path / "log"
    source.write_text(FAKE_NVTX)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvToolsExt.so.1", source],
                   check=True)
    env = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVTX_LOG": str(log), **NVTX}
    run_ranks(2, "torch/profile_suite", "seen_by_nvtx", env=env)
    lines = log.read_text().splitlines()
    assert "horovod.submit allreduce allreduce.x" in lines
    assert lines.count("pop") == len(lines) / 2
    log.unlink()
    run_ranks(2, "torch/profile_suite", "seen_by_nvtx",
              env={**env, "HOROVOD_DISABLE_NVTX_RANGES": "1"})
    assert not log.exists()
