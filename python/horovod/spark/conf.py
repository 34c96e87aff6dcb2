# SPDX-License-Identifier: Apache-2.0
"""Settings of Spark that matter to run_elastic, as (name, value) for SparkConf.set(*pair).

A failed rank comes back as a new attempt of its Spark task. How often Spark makes one, and whether
on an executor where one has failed, is Spark's own business: these say so. "Blacklist" is what
Spark called its spark.excludeOnFailure settings before version 3.1.
"""
_EXCLUDE = "spark.excludeOnFailure"
_ALWAYS = str(2 ** 31 - 1)

# By default Spark starts a task four times, then the job has failed.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", _ALWAYS)

# Are executors left out after failures? The settings below count only if they are.
SPARK_CONF_BLACKLIST_DISABLED = (f"{_EXCLUDE}.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = (f"{_EXCLUDE}.enabled", "true")

# May a task come back on the executor where it has failed?
SPARK_CONF_REUSE_FAILED_EXECUTOR = (f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor", _ALWAYS)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor", "1")

# And other tasks: of this job, or of the whole application?
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_JOB = (f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor", _ALWAYS)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_JOB = (
    f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (
    f"{_EXCLUDE}.application.maxFailedTasksPerExecutor", _ALWAYS)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (
    f"{_EXCLUDE}.application.maxFailedTasksPerExecutor", "1")

# What Spark does if nothing is set.
SPARK_CONF_DEFAULT_VALUES = {
    "spark.task.maxFailures": "4",
    f"{_EXCLUDE}.enabled": "false",
    f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor": "1",
    f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor": "2",
    f"{_EXCLUDE}.application.maxFailedTasksPerExecutor": "2",
}
