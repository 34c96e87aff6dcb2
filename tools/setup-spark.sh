#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Adds what the Spark tests need to a machine tools/setup.sh has made ready: a Java runtime, Open
# MPI's mpirun, and PySpark (some 500 MB, which is why it is not part of `make setup`) in .venv.
#
#   tools/setup-spark.sh [VERSION]    default: the version below
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:-4.3.0}

tools/setup.sh
missing=()
command -v java >/dev/null || missing+=(openjdk-17-jre-headless)
command -v mpirun >/dev/null || missing+=(openmpi-bin)
if [ "${#missing[@]}" != 0 ]; then
    tools/apt-install.sh "${missing[@]}"
fi
have=$(.venv/bin/python -c 'import pyspark; print(pyspark.__version__)' 2>/dev/null || true)
if [ "$have" != "$version" ]; then
    echo "setup: installing PySpark $version"
    pip=(.venv/bin/python -m pip install -q --disable-pip-version-check)
    "${pip[@]}" "pyspark==$version" pyarrow "pandas<3" fsspec grpcio grpcio-status \
        googleapis-common-protos zstandard aiohttp packaging pillow pyyaml tqdm
    # Without what they ask for: PyTorch's wheel would have gigabytes of GPU parts come after all.
    "${pip[@]}" --no-deps "pytorch_lightning>=2" torchmetrics lightning-utilities
fi
