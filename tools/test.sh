#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds every variant, runs its tests, checks the style, and ends with one line, "N passed, M
# failed". A build that fails counts as one failure. Full logs: <build>/Testing/. The tests of
# build-fuzz fuzz each parser for HVD_FUZZ_SECONDS (30).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

builds=${HVD_BUILDS:-build build-clang build-asan build-tsan build-fuzz}
passed=0
failed=0

count() { # passed failed
    passed=$((passed + $1))
    failed=$((failed + $2))
}

# Counts the tests of one ctest run from its closing line, "... N tests failed out of M".
count_ctest() { # log
    local summary n_failed n_all
    summary=$(grep -E '[0-9]+ tests? failed out of [0-9]+' "$1" | tail -n 1)
    if [ -z "$summary" ]; then
        echo "test: no tests ran, see $1"
        count 0 1
        return
    fi
    n_failed=$(sed -E 's/.* ([0-9]+) tests? failed out of .*/\1/' <<<"$summary")
    n_all=$(sed -E 's/.* out of ([0-9]+).*/\1/' <<<"$summary")
    count $((n_all - n_failed)) "$n_failed"
}

# The plain build runs all but what takes long, clang what shows that its code works. Faults and
# attacks, which mostly wait, are run by instrumented builds in make test-long only.
selection_of() { # directory
    case ${HVD_LONG:+all}$1 in
    build) echo "-LE long" ;;
    build-clang) echo "-L unit" ;;
    build-asan | build-tsan) echo "-LE fault|security" ;;
    esac
}

test_build() { # directory
    local logs=$1/Testing
    mkdir -p "$logs"
    echo "== $1: building"
    if ! tools/build.sh "$1" >"$logs/build.log" 2>&1; then
        tail -n 40 "$logs/build.log"
        echo "test: $1 does not build, see $logs/build.log"
        count 0 1
        return
    fi
    echo "== $1: testing"
    # shellcheck disable=SC2046 # two words, or none
    ctest --test-dir "$1" $(selection_of "$1") --output-on-failure --parallel "$(nproc)" 2>&1 |
        tee "$logs/ctest.log"
    count_ctest "$logs/ctest.log"
}

for build in $builds; do
    test_build "$build"
done

echo "== style"
if tools/check-style; then
    count 1 0
else
    count 0 1
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
