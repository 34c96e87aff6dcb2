#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds every variant, runs its tests, checks the style, and ends with one line, "N passed, M
# failed". A build that fails counts as one failure. Full logs: <build>/Testing/. The tests of
# build-fuzz fuzz each parser for HVD_FUZZ_SECONDS (15).
#
#   tools/test.sh          everything: make test
#   tools/test.sh --quick  in build/, the tests with the label "unit" or "quick": make check
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

n_slowest=5
n_places=$((2 * $(nproc))) # tests that keep a processor busy take two: tests/tests.cmake
quick=
builds=${HVD_BUILDS:-build build-clang build-asan build-tsan build-fuzz}
case ${1:-} in
'') ;;
--quick) quick=yes builds=build ;;
*)
    echo "test: no such option: $1 (--quick)" >&2
    exit 2
    ;;
esac
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
    case ${quick:+quick}${HVD_LONG:+all}$1 in
    quick*) echo "-L ^(unit|quick)\$" ;;
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
    ctest --test-dir "$1" $(selection_of "$1") --output-on-failure --parallel "$n_places" 2>&1 |
        tee "$logs/ctest.log"
    count_ctest "$logs/ctest.log"
    print_slowest "$logs/ctest.log"
}

# From lines such as " 3/85 Test  #7: test_net ......   Passed    3.53 sec".
print_slowest() { # log
    echo "slowest:"
    sed -nE 's|^ *[0-9]+/[0-9]+ Test +#[0-9]+: ([^ ]+) .* ([0-9.]+) sec.*|\2 s \1|p' "$1" |
        sort -rn | head -n "$n_slowest" | sed 's/^/  /'
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
