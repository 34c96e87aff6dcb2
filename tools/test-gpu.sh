#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make test-gpu: real PyTorch, made for CUDA 13 (that of .venv) and for CUDA 12, on the simulated
# GPU of tests/gpu, with 2 and 3 ranks.
#
#   ARGUMENTS=...   more arguments for pytest, as -k lazy
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
with_cuda_12=2.6.0

run() { # environment, major version of CUDA
    echo "$1, CUDA $2:"
    # shellcheck disable=SC2086 # several arguments
    HVD_BUILD=$PWD/build HVD_GPU_RANKS="2 3" GPUSIM_CUDA=$2 PYTHONPATH=$PWD/build/python \
        "$1"/bin/python -m pytest tests/gpu/test_torch.py ${ARGUMENTS:-}
}

run .venv 13
tools/torch-environment.sh $with_cuda_12
run .venv-torch-$with_cuda_12 12
