#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs tests of TensorFlow's operations with libhvd_tf.so instrumented by the address sanitizer,
# which watches the heap of the whole process then. Python and TensorFlow are not instrumented, so
# the sanitizer is loaded before them, with the library of C++ it asks for exceptions, and does not
# look for leaks. What was freed is kept from being used again only for a while, or memory would not
# be flat for the test that looks at it. Arguments are pytest's.
#
#   tools/test-tensorflow-asan.sh [-k "opposite or movements"]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
package=$root/build/tensorflow-asan

rm -rf "$package"
mkdir -p "$package/horovod"
for entry in build/python/horovod/*; do
    ln -s "$(readlink -f "$entry")" "$package/horovod/"
done
rm "$package/horovod/libhvd_tf.so"
gcc -std=gnu11 -O1 -g -fPIC -shared -fsanitize=address -fvisibility=hidden -Wall -Wextra -Werror \
    -Iinclude -Isrc src/bind/tf_*.c -o "$package/horovod/libhvd_tf.so" \
    -Lbuild -lhvd -Wl,-rpath,"$root/build"

options=detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:quarantine_size_mb=8
cd build
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so.6)" \
    PYTHONPATH=$package \
    ASAN_OPTIONS=$options \
    "$root/.venv/bin/python" -m pytest "$root/tests/python/tensorflow/test_tf_ops.py" "$@"
