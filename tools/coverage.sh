#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds build-cov (gcc, counting lines), runs the C tests there, and prints how much of each module
# they reach; fails below the bounds in tools/coverage-report. Ranks that are killed on purpose do
# not count what they did.
#
#   tools/coverage.sh                  all C tests
#   tools/coverage.sh -L unit          arguments go to ctest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/build.sh build-cov
find build-cov -name '*.gcda' -delete
if [ $# -eq 0 ]; then
    set -- -L 'unit|ranks|fault|security'
fi
# A test that fails has been counted all the same; the test builds are where it matters.
ctest --test-dir build-cov --parallel "$((2 * $(nproc)))" "$@" || echo "coverage: some tests failed"
tools/coverage-report build-cov
