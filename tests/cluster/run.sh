#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The chart on a real cluster, with Helm 3 and Helm 4: run.sh BUILD_DIR [TEST ...], for example
# Restricted.test_mnist_trains. Before that, what of the chart's tests needs tools built with Go.
#
#   KUBECONFIG   a cluster of three nodes to use, which has the images; without it one is made with
#                cluster.sh, and ended again (KEEP=1: not ended)
#   IMAGE_STORE  where the images are built; default: BUILD_DIR/images
#   HELM         the only helm to use
#   HVD_QUIET=1  for a machine that does nothing else: holds the times it prints to their limits
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$(realpath -m "$1")
shift
venv=$build/venv-chart
helms=("${HELM:-$venv/bin/helm}")
if [ -z "${HELM:-}" ]; then
    "$here/../chart/unittest.sh" "$build/go-tools"
    "$here/../chart/helm4.sh" "$build/go-tools"
    helms+=("$build/go-tools/helm")
fi
"$here/../chart/run.sh" "$build" test_chart

if [ -z "${KUBECONFIG:-}" ]; then
    store=${IMAGE_STORE:-$build/images}
    export NODES=3
    [ -n "${KEEP:-}" ] || trap '"$here/cluster.sh" down' EXIT
    "$here/cluster.sh" up
    "$here/images.sh" "$store" "$store/tars"
    eval "$("$here/cluster.sh" env)"
    for tar in "$store"/tars/*.tar; do
        "$here/cluster.sh" load "$tar"
        rm "$tar"
    done
fi
export PATH=$venv/bin:$PATH
cd "$here"
tests=(test_cluster)
if [ $# -gt 0 ]; then
    tests=("${@/#/test_cluster.}")
fi
for helm in "${helms[@]}"; do
    printf '\n%s\n' "$("$helm" version --short)"
    HELM=$helm "$venv/bin/python" -m unittest -v "${tests[@]}"
done
