#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Configures (once) and builds one of the build directories:
#
#   build        gcc, what users get          build-asan   address and undefined sanitizers
#   build-clang  clang, for its warnings      build-tsan   thread sanitizer
#   build-fuzz   the fuzz targets only        build-cov    counts which lines run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

directory=${1:-build}
case $directory in
build) options=(-DCMAKE_C_COMPILER=gcc) ;;
build-clang) options=(-DCMAKE_C_COMPILER=clang) ;;
build-asan) options=(-DCMAKE_C_COMPILER=clang -DHVD_SANITIZE=address) ;;
build-tsan) options=(-DCMAKE_C_COMPILER=clang -DHVD_SANITIZE=thread) ;;
build-cov) options=(-DCMAKE_C_COMPILER=gcc -DHVD_COVERAGE=ON) ;;
build-fuzz) options=(-DCMAKE_C_COMPILER=clang -DHVD_FUZZ=ON) ;;
*)
    echo "build: no such build: $directory (build or build-clang, -asan, -tsan, -fuzz, -cov)" >&2
    exit 1
    ;;
esac

if [ ! -e "$directory/build.ninja" ]; then
    cmake -S . -B "$directory" -G Ninja "${options[@]}"
fi
cmake --build "$directory" --parallel "$(nproc)"
