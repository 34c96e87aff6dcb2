#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make release: builds, checks and lists what would be published, in dist/release/ (or the folder
# named by OUT), from what is committed. Nothing is sent anywhere.
#
#   MACHINES="x86_64 aarch64"     for which machines (default: both; each is cross-compiled)
#   HOME_URL=https://host/name    where the sources are published: links of the description
#   OUT=folder
#
# The same commit gives the same bytes: every date is the commit's, names are sorted, compiler and
# libraries are those of tools/release/toolchain.sh. tools/release/test-reproducible.sh compares.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=$(realpath -m "${OUT:-dist/release}")
machines=${MACHINES:-x86_64 aarch64}
here=$PWD/build-release
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC
umask 022

if [ -n "$(git status --porcelain --untracked-files=no)" ]; then
    echo "release: what is not committed is not in it" >&2
fi
for machine in $machines; do
    tools/release/toolchain.sh "$machine"
done
export ZIG_GLOBAL_CACHE_DIR=$here/zig-cache ZIG_LOCAL_CACHE_DIR=$here/zig-cache
python=$here/venv/bin/python
rm -rf "$out"
mkdir -p "$out"
work=$here/work
rm -rf "$work"
mkdir "$work"
trap 'rm -rf "$work"' EXIT

echo "release: the source package"
mkdir "$work/tree"
git archive HEAD | tar -x -C "$work/tree"
"$python" tools/release/describe.py "$work/tree" "${HOME_URL:-}"
"$python" -m build -q --sdist --no-isolation --outdir "$out" "$work/tree"
source=$(echo "$out"/horovod-*.tar.gz)
version=$(basename "${source#"$out"/horovod-}" .tar.gz)
# Everything else is built from that package: what it lacks is missed here.
tar -xzf "$source" -C "$work"
tree=$work/horovod-$version

# cmake_options MACHINE: how CMake is told to build for it
cmake_options() {
    local place=$here/$1
    echo "CMAKE_TOOLCHAIN_FILE=$place/toolchain.cmake OPENSSL_ROOT_DIR=$place/openssl" \
        "CURL_ROOT=$place/curl HVD_STATIC_SSL=$place/openssl/lib/libssl.a" \
        "HVD_STATIC_CRYPTO=$place/openssl/lib/libcrypto.a CMAKE_C_FLAGS=-I$place/headers" \
        "CMAKE_SHARED_LINKER_FLAGS=-s CMAKE_MODULE_LINKER_FLAGS=-s CMAKE_EXE_LINKER_FLAGS=-s"
}

wheel() {
    local machine=$1 option options=()
    for option in $(cmake_options "$machine"); do
        options+=(-C "cmake.define.$option")
    done
    rm -rf "$tree/build-wheel"
    _PYTHON_HOST_PLATFORM=linux-$machine "$python" -m build --wheel --no-isolation \
        --outdir "$work/$machine" -C install.strip=false "${options[@]}" "$tree" \
        >"$here/$machine/wheel.log" 2>&1 || {
        tail -30 "$here/$machine/wheel.log"
        exit 1
    }
    "$python" -m wheel tags --remove --platform-tag "manylinux_2_28_$machine" \
        "$work/$machine"/*.whl >/dev/null
    "$python" tools/release/pack.py "$work/$machine"/*.whl "$out"
}

for machine in $machines; do
    echo "release: the wheel for $machine"
    wheel "$machine"
    echo "release: the Debian package for $machine"
    # shellcheck disable=SC2046
    tools/release/deb.sh "$machine" "$tree" "$out" $(cmake_options "$machine")
done
echo "release: the chart"
tools/release/chart.sh "$tree/charts/horovod" "$out"
"$python" tools/release/sbom.py "$tree" "$version" >"$out/horovod-$version.cdx.json"
(cd "$out" && sha256sum -- * >SHA256SUMS)
tools/release/check.sh "$out"
ls -l "$out"
