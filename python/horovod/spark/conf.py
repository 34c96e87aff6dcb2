# SPDX-License-Identifier: Apache-2.0
"""Settings of Spark that matter to run_elastic, as (name, value) for SparkConf.set(*pair).

A failed rank comes back as a new attempt of its Spark task. How often Spark makes one, and whether
on an executor or a node where one has failed, is Spark's own business: these say so. "Blacklist" is
what Spark called its spark.excludeOnFailure settings before version 3.1.
"""
_EXCLUDE = "spark.excludeOnFailure"

SPARK_CONF_MAX_INT = str(2 ** 31 - 1)
SPARK_CONF_MAX_INT_MINUS_ONE = str(2 ** 31 - 2)  # for a node: fewer than attempts of a task

# By default Spark starts a task four times, then the job has failed.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", SPARK_CONF_MAX_INT)

# Are executors and nodes left out after failures? The settings below count only if they are.
SPARK_CONF_BLACKLIST_DISABLED = (f"{_EXCLUDE}.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = (f"{_EXCLUDE}.enabled", "true")

# May a task come back on the executor, or the node, where it has failed?
_SAME_TASK = f"{_EXCLUDE}.task.maxTaskAttemptsPer"
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (f"{_SAME_TASK}Executor", SPARK_CONF_MAX_INT)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (f"{_SAME_TASK}Executor", "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK = (f"{_SAME_TASK}Executor", "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (f"{_SAME_TASK}Node", SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (f"{_SAME_TASK}Node", "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK = (f"{_SAME_TASK}Node", "1")

# May any task of this job be started where one has failed?
_JOB = f"{_EXCLUDE}.stage.maxFailed"
SPARK_CONF_REUSE_FAILED_EXECUTOR = (f"{_JOB}TasksPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (f"{_JOB}TasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_JOB = SPARK_CONF_REUSE_FAILED_EXECUTOR
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_JOB = SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR
SPARK_CONF_REUSE_FAILED_NODE = (f"{_JOB}ExecutorsPerNode", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_NODE = (f"{_JOB}ExecutorsPerNode", "1")

# And of the whole application?
_APP = f"{_EXCLUDE}.application.maxFailed"
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_APP}TasksPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_APP}TasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILED_NODE_IN_APP = (f"{_APP}ExecutorsPerNode", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_NODE_IN_APP = (f"{_APP}ExecutorsPerNode", "1")

# What Spark does if nothing is set.
SPARK_CONF_DEFAULT_VALUES = {
    "spark.task.maxFailures": "4",
    f"{_EXCLUDE}.enabled": "false",
    f"{_SAME_TASK}Executor": "1",
    f"{_SAME_TASK}Node": "2",
    f"{_JOB}TasksPerExecutor": "2",
    f"{_JOB}ExecutorsPerNode": "2",
    f"{_APP}TasksPerExecutor": "2",
    f"{_APP}ExecutorsPerNode": "2",
}
