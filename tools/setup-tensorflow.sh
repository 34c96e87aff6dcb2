#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes an environment for each TensorFlow named on the command line: .venv-tf<version>, with what
# the tests need. One that is there already is left alone. TensorFlow 2.15 comes with Keras 2 and
# has packages for Python 3.9 to 3.11; python3 of Debian 12 will do.
#
#   tools/setup-tensorflow.sh 2.18.1 2.15.1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for version in "$@"; do
    environment=.venv-tf$version
    if [ -e "$environment/complete" ]; then
        continue
    fi
    echo "setup: making $environment"
    python3 -m venv --clear "$environment"
    "$environment/bin/python" -m pip install -q --disable-pip-version-check \
        "tensorflow-cpu==$version" cloudpickle packaging psutil pytest pyyaml
    touch "$environment/complete"
done
