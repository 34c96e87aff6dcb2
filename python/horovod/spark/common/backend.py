# SPDX-License-Identifier: Apache-2.0
"""Where an estimator trains. Any object with these two methods will do."""
import os
from typing import Any, Callable, Dict, List, Mapping, Optional

from horovod.spark.agent import SPARK_SECRETS


def default_num_proc() -> int:
    """The task slots of the active Spark application."""
    import time

    from horovod.spark import connect, launch, slots

    start_timeout = launch.start_timeout_of(None)
    deadline = time.monotonic() + start_timeout
    session, context = launch.find_spark()
    if session is not None:
        return connect.default_num_proc(session, deadline, start_timeout)
    return slots.default_num_proc(context, deadline)


class Backend:
    """Runs a function on a number of processes that form one Horovod job."""

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Optional[Mapping] = None,
            env: Optional[Mapping[str, str]] = None) -> List[Any]:
        raise NotImplementedError

    def num_processes(self) -> int:
        raise NotImplementedError


class SparkBackend(Backend):
    """horovod.spark.run on the active application; other arguments are passed on to it."""

    def __init__(self, num_proc: Optional[int] = None, env: Optional[Mapping[str, str]] = None,
                 **kwargs: Any) -> None:
        self._num_proc = num_proc or default_num_proc()
        given: Dict[str, Optional[str]] = dict(os.environ if env is None else env)
        # Which GPU a process uses is decided where it runs, not here; and what opens this driver
        # is nobody else's.
        for name in ("CUDA_VISIBLE_DEVICES", *SPARK_SECRETS):
            given.pop(name, None)
        self._env = given
        self._kwargs = kwargs

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Optional[Mapping] = None,
            env: Optional[Mapping[str, str]] = None) -> List[Any]:
        import horovod.spark

        return horovod.spark.run(fn, args=args, kwargs=kwargs, num_proc=self._num_proc,
                                 env={**self._env, **(env or {})}, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc
