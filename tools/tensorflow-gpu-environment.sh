#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes .venv-tfgpu-VERSION, once: an environment for tests with TensorFlow as it is made for GPUs,
# without the packages of NVIDIA that it would load. Half a gigabyte to fetch, two on the disk.
#
#   tensorflow-gpu-environment.sh 2.21.0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$1
environment=.venv-tfgpu-$version
if ! [ -e "$environment/complete" ]; then
    echo "setup: making $environment; some minutes"
    python3 -m venv --clear "$environment"
    "$environment"/bin/python -m pip install -q --disable-pip-version-check \
        "tensorflow==$version" cloudpickle packaging psutil pytest pyyaml
    touch "$environment/complete"
fi
