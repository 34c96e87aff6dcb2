#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The PyTorch part of `make demo`: trains examples/pytorch_mnist.py on one rank and on two, and says
# how fast each was and where the timeline of the second is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

timeline=$PWD/build/demo-timeline.json
for ranks in 1 2; do
    echo
    echo "PyTorch on $ranks rank(s): horovodrun -np $ranks python examples/pytorch_mnist.py"
    options=()
    if [ "$ranks" = 2 ]; then
        options=(--timeline-filename "$timeline")
    fi
    ./build/horovodrun -np "$ranks" "${options[@]}" \
        .venv/bin/python examples/pytorch_mnist.py --epochs 1 --limit 6000
done
echo
echo "Timeline of the last job, for https://ui.perfetto.dev: $timeline"
