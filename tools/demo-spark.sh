#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The Spark part of `make demo`: the toy of docs/spark.md on a local session of two task slots.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup-spark.sh
echo
echo "Spark on two task slots: python examples/spark_hello.py"
SPARK_LOCAL_IP=127.0.0.1 PYSPARK_PYTHON=$PWD/.venv/bin/python \
    .venv/bin/python examples/spark_hello.py
