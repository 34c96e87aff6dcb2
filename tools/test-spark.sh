#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# horovod.spark on real Spark, once with each version of PySpark.
#
#   tools/test-spark.sh [VERSION...] [-- PYTEST ARGUMENTS]    default: the versions below
#
# A version other than that of .venv gets an environment of its own, .venv-spark-VERSION, which has
# PySpark and takes the rest from .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
versions=()
while [ $# != 0 ] && [ "$1" != -- ]; do
    versions+=("$1")
    shift
done
[ $# = 0 ] || shift
[ "${#versions[@]}" != 0 ] || versions=(4.3.0 3.5.9)
tests=("$@")
# These load parts of PyTorch that do not bear TensorFlow in the same process.
apart=(tests/spark/test_estimator_names.py tests/spark/test_lightning_estimator.py
    tests/spark/test_torch_estimator.py)

base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for version in "${versions[@]}"; do
    python=.venv/bin/python
    if [ "$($python -c 'import pyspark; print(pyspark.__version__)')" != "$version" ]; then
        folder=.venv-spark-$version
        python=$folder/bin/python
        if ! $python -c 'import pyspark, pandas' 2>/dev/null; then
            .venv/bin/python -m venv --clear "$folder"
            $python -m pip install -q --disable-pip-version-check "pyspark==$version" "pandas<3"
        fi
        site=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        printf '%s\n' "$PWD/build/python" "$base" >"$site/base.pth"
    fi
    echo "== PySpark $version"
    if [ "${#tests[@]}" != 0 ]; then
        $python -m pytest "${tests[@]}"
    else
        $python -m pytest tests/spark "${apart[@]/#/--ignore=}"
        $python -m pytest "${apart[@]}"
    fi
done
