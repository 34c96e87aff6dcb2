# SPDX-License-Identifier: Apache-2.0
"""run(use_mpi=True): ranks under a real mpirun, with Spark tasks in the place of its ssh."""
import os
import subprocess
import sys
import time

import cloudpickle
import pytest

import horovod.spark
from horovod.spark import mpi

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import the tests

LOOPBACK = "-mca oob_tcp_if_include lo -mca btl_tcp_if_include lo"


def test_the_command_line():
    words = mpi.command_of("/opt/bin/mpirun", mpi.DIALECTS[4], {"a-1": 2, "b-2": 1}, "eth0,eth1",
                           "--tag-output -x 'A=b c'")
    text = " ".join(words)
    assert words[:5] == ["/opt/bin/mpirun", "-np", "3", "-H", "a-1:2,b-2:1"]
    assert "-mca oob_tcp_if_include eth0,eth1" in text
    assert words[words.index("plm_rsh_agent") + 1].endswith("horovodrun --shell")
    assert words[-3:] == ["--tag-output", "-x", "A=b c"]
    assert "--prtemca plm_ssh_agent" in " ".join(
        mpi.command_of("mpirun", mpi.DIALECTS[5], {"a": 1}, None, None))


def test_no_mpirun(tmp_path):
    with pytest.raises(Exception, match="^horovod does not find an installed MPI."):
        mpi.find_mpirun({"PATH": str(tmp_path)})
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'HYDRA build details'\n")
    (tmp_path / "mpirun").chmod(0o755)
    with pytest.raises(Exception, match="^horovod does not find an installed MPI.*HYDRA"):
        mpi.find_mpirun({"PATH": str(tmp_path)})


def test_ranks_are_those_of_mpirun(spark, capfd):
    def fn(x):
        from horovod import _core as hvd

        hvd.init([])
        print("rank", hvd.rank(), "of", hvd.size())
        seen = hvd.rank(), hvd.local_rank(), int(os.environ["OMPI_COMM_WORLD_RANK"]), x
        hvd.shutdown()
        return seen

    seen = horovod.spark.run(fn, (bytes(3 << 20),), num_proc=2, use_mpi=True,
                             extra_mpi_args=LOOPBACK)
    assert seen == [(rank, rank, rank, bytes(3 << 20)) for rank in range(2)]
    lines = capfd.readouterr().out.strip().split("\n")
    assert sorted(lines) == ["Running 2 processes...", "rank 0 of 2", "rank 1 of 2"]


def test_a_failed_rank_ends_the_job(spark, ranks):
    def fn(folder):
        open(f"{folder}/{os.getpid()}", "w").close()
        if os.environ["HOROVOD_RANK"] == "1":
            with open(f"{folder}/struck", "w") as file:
                file.write(str(time.time()))
            raise ValueError("planted")
        time.sleep(600)

    with pytest.raises(RuntimeError, match="^mpirun failed with exit code") as info:
        horovod.spark.run(fn, (ranks.folder,), num_proc=2, use_mpi=True, extra_mpi_args=LOOPBACK)
    ranks.check_end()
    assert "ValueError: planted" in str(info.value)


def test_an_mpirun_that_fails(spark):
    with pytest.raises(RuntimeError, match="^mpirun failed with exit code"):
        horovod.spark.run(print, num_proc=2, use_mpi=True, extra_mpi_args="--no-such-option")
    assert subprocess.run(["pgrep", "-P", str(os.getpid()), "mpirun"]).returncode == 1


def test_what_cannot_be_asked(spark):
    with pytest.raises(Exception, match="env argument must be a dict"):
        horovod.spark.run(print, num_proc=1, use_mpi=True, env=os.environ)
    with pytest.raises(ValueError, match="choose one"):
        horovod.spark.run(print, num_proc=1, use_mpi=True, use_gloo=True)
