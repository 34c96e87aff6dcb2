#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make bench: our collectives beside those of other libraries, in the same rounds on this machine.
#
#   LAB=DIR     folder with the other libraries (Open MPI, MPICH, Intel MPI, oneCCL, Gloo, the
#               original Horovod), each in a virtual environment of its own. Without it only our own
#               figures and plain memcpy are measured, and the run says so.
#   SETS=...    which tables (default: all that this user may run; bench/peers/grid.py has them)
#   ROUNDS=5    rounds; every contender runs once in each, in rotated order
#   BUDGET=0.2  seconds per contender, operation and size
#   MINUTES=... at most, as far as what is under way takes no longer
#   EXTRA=...   more options of bench/peers/side_by_side.py
set -euo pipefail
cd "$(dirname "$0")/.."
build=build
[ -x $build/hvd-bench ] || tools/build.sh $build
out=${OUT:-$build/bench}
mkdir -p "$out"
sets=${SETS:-local2,many,types,local3,local4}
if [ -z "${SETS:-}" ] && [ "$(id -u)" = 0 ]; then
    # Two network namespaces, which only root may make.
    sets=local2,many,veth,types,veth-many,veth10g,veth1g,veth-2x2,local3,local4
fi
if [ -z "${LAB:-}" ]; then
    echo "LAB is not set: the other libraries are left out; only ours and memcpy are measured." >&2
fi
exec python3 bench/peers/side_by_side.py --set "$sets" --rounds "${ROUNDS:-5}" \
    --budget "${BUDGET:-0.2}" --minutes "${MINUTES:-inf}" --ours $build/hvd-bench \
    --out "$out/results.jsonl" --report "$out/tables.md" ${EXTRA:-}
