# SPDX-License-Identifier: Apache-2.0
"""Horovod jobs inside a Spark application: `horovod.spark.run(fn)` runs fn on every task slot.

    driver   launch.py    run(): waits for slots, starts the Spark job, raises what went wrong
             session.py   the launcher's session, a child process: agents, output, results
             connect.py   the same through Spark Connect, where a task leads the job
             mpi.py       the same with mpirun
             elastic.py   run_elastic(): the same for a job whose ranks may fail and come
    task     agent.py     what a Spark task does: starts the launcher's agent, waits for its end
    rank     rank.py      the rank: loads the function, calls it, hands the result back

This file stays light: every rank imports it.
"""
import importlib
from typing import Any

__all__ = ["run", "run_elastic"]


def __getattr__(name: str) -> Any:
    homes = {"run": "launch", "run_elastic": "elastic"}
    if name not in homes:
        raise AttributeError(f"module 'horovod.spark' has no attribute {name!r}")
    return getattr(importlib.import_module(f"horovod.spark.{homes[name]}"), name)
