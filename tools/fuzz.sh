#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fuzzes one target for HVD_FUZZ_SECONDS (15). Starts from the kept corpus, which is only read, and
# from what earlier runs found; new inputs go to WORK/<target>, and one that breaks something to
# WORK/<target>-crash-... with the command that runs it again. ctest calls this for every target.
#
#   tools/fuzz.sh PROGRAM CORPUS WORK MAX_BYTES
#   tools/fuzz.sh --keep PROGRAM CORPUS WORK   adds what reaches new code to the corpus
set -euo pipefail

if [ "${1:-}" = --keep ]; then
    program=$2 corpus=$3 work=$4/$(basename "$2")
    mkdir -p "$corpus" "$work"
    # By edges only: few and small inputs.
    exec "$program" -set_cover_merge=1 -use_counters=0 "$corpus" "$work"
fi

program=$1 corpus=$2 work=$3 max_bytes=$4
name=$(basename "$program")
seconds=${HVD_FUZZ_SECONDS:-15}
export ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=1
mkdir -p "$work/$name" "$corpus"
exec timeout --kill-after=10 $((seconds * 2 + 120)) \
    "$program" "$work/$name" "$corpus" -max_total_time="$seconds" -max_len="$max_bytes" \
    -timeout=20 -rss_limit_mb=1024 -malloc_limit_mb=256 -print_final_stats=1 -verbosity=1 \
    -artifact_prefix="$work/$name-"
