#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make test-torch-versions: the tests of horovod.torch, with the build that is in build/, under
# versions of PyTorch other than the one of .venv. Each gets an environment of its own, made once
# (some minutes and about a gigabyte each): .venv-torch-VERSION.
#
#   VERSIONS="2.6.0 2.1.2"  which; one Python must be able to run them all (3.11 can)
#   ARGUMENTS=...           more arguments for pytest, as -k training
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=()
for version in ${VERSIONS:-2.6.0 2.1.2}; do
    environment=.venv-torch-$version
    tools/torch-environment.sh "$version"
    echo "PyTorch $version:"
    # shellcheck disable=SC2086 # several arguments
    PYTHONPATH=$PWD/build/python "$environment"/bin/python -m pytest tests/python/torch \
        ${ARGUMENTS:-} || failed+=("$version")
done
if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed with PyTorch ${failed[*]}" >&2
    exit 1
fi
