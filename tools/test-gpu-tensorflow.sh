#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make test-gpu-tensorflow: TensorFlow as it is made for GPUs, on the simulated GPU of tests/gpu,
# with 2 and 3 ranks.
#
#   ARGUMENTS=...   more arguments for pytest, as -k lazy
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=2.21.0

tools/tensorflow-gpu-environment.sh $version
# shellcheck disable=SC2086 # several arguments
HVD_BUILD=$PWD/build HVD_GPU_RANKS="2 3" PYTHONPATH=$PWD/build/python \
    .venv-tfgpu-$version/bin/python -m pytest tests/gpu/test_tensorflow.py ${ARGUMENTS:-}
