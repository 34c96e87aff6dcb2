#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes .venv-torch-VERSION, once: an environment for tests with another version of PyTorch than
# that of .venv. Some minutes and about a gigabyte.
#
#   torch-environment.sh 2.6.0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$1
environment=.venv-torch-$version
if ! $environment/bin/python -c 'import pytest, torch' 2>/dev/null; then
    python3 -m venv --clear "$environment"
    "$environment"/bin/python -m pip install -q --disable-pip-version-check \
        cloudpickle packaging psutil pytest pyyaml
    "$environment"/bin/python tools/install-torch.py "$version"
fi
