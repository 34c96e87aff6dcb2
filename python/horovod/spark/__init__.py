# SPDX-License-Identifier: Apache-2.0
"""Horovod jobs inside a Spark application: `horovod.spark.run(fn)` runs fn on every task slot.

    driver   launch.py    run(): waits for slots, starts the Spark job, raises what went wrong
             driver.py    the desk agents report to: registrations, output, results, failures
             plan.py      which task becomes which rank
             connect.py   the same through Spark Connect, where a task leads the job
             mpi.py       the same with mpirun: its remote shell is shell.py, its ranks mpi_rank.py
             elastic.py   run_elastic(): the same for a job whose ranks may fail and come
    task     agent.py     what a Spark task does: registers, starts the rank, carries its output
    rank     warden.py    the rank's parent: nothing of the rank outlives the task
             rank.py      the rank: loads the function, calls it, hands the result back
             notes.py     what an agent and its elastic rank leave each other
    between  line.py      frames over a channel that has proved the job's secret

This file stays light: every rank imports it.
"""
from typing import Any

__all__ = ["run", "run_elastic"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from horovod.spark.launch import run

        return run
    if name == "run_elastic":
        from horovod.spark.elastic import run_elastic

        return run_elastic
    raise AttributeError(f"module 'horovod.spark' has no attribute {name!r}")
