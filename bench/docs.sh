#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make bench-docs: measures anew what docs/benchmarks.md shows, and writes its tables and pictures.
# For a machine that does nothing else; root, for the two hosts.
#
#   LAB=DIR     folder with the other libraries, as bench/run.sh says
#   MINUTES=14  at most, in all; what does not fit into them has fewer rounds, or none
#   MOST=...    bytes of the largest tensor (default: 256 MiB)
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${MINUTES:-14}
out=${OUT:-build/bench-docs}
mkdir -p "$out"
rm -f "$out/results.jsonl"
# Large tensors take most of the time: over 16 MiB only two ranks on one host have them.
MINUTES=$(awk "BEGIN { print $minutes * 0.2 }") BUDGET=0.05 ROUNDS=3 OUT=$out SETS=local2 \
    EXTRA="--skip mpich-mt --max-bytes ${MOST:-268435456}" bench/run.sh >"$out/log" 2>&1
MINUTES=$(awk "BEGIN { print $minutes * 0.4 }") BUDGET=0.04 ROUNDS=5 OUT=$out \
    SETS=many,veth,veth10g,veth1g,types,veth-many,veth-2x2,local3,local4 \
    EXTRA="--skip mpich-mt --max-bytes 16777216" bench/run.sh >>"$out/log" 2>&1
.venv/bin/python bench/torch_bench.py --rounds 3 --tests resnet50,transformer \
    --nets local,veth10g,veth1g --minutes "$(awk "BEGIN { print $minutes * 0.35 }")" \
    --out "$out/training.json" >>"$out/log" 2>&1 || tail -n 3 "$out/log" >&2
python3 bench/publish.py --results "$out/results.jsonl" --training "$out/training.json"
