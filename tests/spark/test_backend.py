# SPDX-License-Identifier: Apache-2.0
"""SparkBackend: what it hands on to horovod.spark.run."""
import horovod.spark
from horovod.spark import connect, launch
from horovod.spark.agent import SPARK_SECRETS
from horovod.spark.common.backend import SparkBackend


def test_the_environment_without_what_is_the_drivers(monkeypatch):
    for name in ("COLOUR", "CUDA_VISIBLE_DEVICES", *SPARK_SECRETS):
        monkeypatch.setenv(name, "here")
    told = {}
    monkeypatch.setattr(horovod.spark, "run", lambda fn, **given: told.update(given), raising=False)
    SparkBackend(2, verbose=0).run(print, (1,), env={"SHAPE": "round"})
    assert told["num_proc"] == 2 and told["verbose"] == 0 and told["args"] == (1,)
    assert told["env"]["COLOUR"] == "here" and told["env"]["SHAPE"] == "round"
    assert not {"CUDA_VISIBLE_DEVICES", *SPARK_SECRETS} & set(told["env"])
    assert SparkBackend(2, env={"_SPARK_AUTH_SECRET": "1"})._env == {}


def test_through_connect_no_context_is_needed(monkeypatch):
    monkeypatch.setattr(launch, "find_spark", lambda: ("session", None))
    monkeypatch.setattr(connect, "default_num_proc", lambda session, *_: {"session": 3}[session])
    assert SparkBackend().num_processes() == 3
