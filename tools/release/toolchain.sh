#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A C compiler for one machine and glibc 2.28, and the libraries that a release carries, built with
# it: tools/release/toolchain.sh ARCH, with ARCH x86_64 or aarch64. Everything is made in
# build-release/, which keeps it.
#
#   build-release/venv           the compiler (zig's clang, from PyPI) and what checks packages
#   build-release/ARCH/cc        that compiler for ARCH; toolchain.cmake says so to CMake
#   build-release/ARCH/openssl   static, by tools/openssl.sh; likewise curl
#   build-release/ARCH/libs      libyaml and jansson, static; headers of libfabric
#
# Why not the system's gcc: a program runs with the glibc it was linked with, or a newer one. Zig
# has the symbols of every glibc, of every machine. The sources come from Debian's archive and
# crates.io, and are checked against their hashes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

arch=$1
glibc=2.28
here=$PWD/build-release
place=$here/$arch
case $arch in
x86_64 | aarch64) ;;
*)
    echo "toolchain: no such machine: $arch (x86_64 or aarch64)" >&2
    exit 1
    ;;
esac

mkdir -p "$place"
if ! cmp -s tools/release/requirements.txt "$here/venv/requirements.txt"; then
    echo "release: installing the compiler and the checkers"
    python3 -m venv "$here/venv"
    "$here/venv/bin/python" -m pip install -q --disable-pip-version-check \
        -r tools/release/requirements.txt
    cp tools/release/requirements.txt "$here/venv/requirements.txt"
fi

# -fno-sanitize: zig would add checks of its own to what is built without -O.
zig=$("$here/venv/bin/python" -c 'import ziglang; print(ziglang.__path__[0] + "/zig")')
cat >"$place/cc.new" <<END
#!/bin/sh
exec "$zig" cc -target $arch-linux-gnu.$glibc -fno-sanitize=all "\$@"
END
for tool in ar ranlib; do
    printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" $tool >"$place/$tool.new"
done
for tool in cc ar ranlib; do
    chmod +x "$place/$tool.new"
    mv "$place/$tool.new" "$place/$tool"
done
# What __builtin_cpu_supports() needs and zig does not bring: the object of the system's gcc.
standard=
if [ "$arch" = x86_64 ]; then
    standard=$place/libcpuinfo.a
    rm -f "$standard"
    (cd "$place" && command ar x "$(gcc -print-libgcc-file-name)" cpuinfo.o &&
        command ar rcD "$standard" cpuinfo.o && rm cpuinfo.o)
fi
# Zig's headers are those of a newer glibc, and these declare functions that 2.28 does not have.
mkdir -p "$place/headers/bits"
echo "// Left out: newer than the glibc that is built for." >"$place/headers/bits/inet-fortified.h"
cat >"$place/toolchain.cmake" <<END
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $arch)
set(CMAKE_C_COMPILER "$place/cc")
set(CMAKE_AR "$place/ar")
set(CMAKE_RANLIB "$place/ranlib")
set(CMAKE_C_STANDARD_LIBRARIES "$standard")
set(CMAKE_FIND_ROOT_PATH "$place/libs" "$place/openssl" "$place/curl")
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE BOTH)
set(CMAKE_IGNORE_PREFIX_PATH /usr /usr/local)
END

export ZIG_GLOBAL_CACHE_DIR=$here/zig-cache ZIG_LOCAL_CACHE_DIR=$here/zig-cache
export PATH=$place:$PATH CC=cc AR=ar RANLIB=ranlib HVD_MACHINE=$arch # no paths: OpenSSL notes CC
export SOURCE_DATE_EPOCH=0 LC_ALL=C
export HVD_TOOLCHAIN=$place/toolchain.cmake
tools/openssl.sh "$place/openssl"
tools/curl.sh "$place/curl" "$place/openssl"

# library NAME URL SHA256 OPTIONS…: fetches, checks and builds a static library with CMake.
library() {
    local name=$1 url=$2 sha256=$3
    shift 3
    mkdir "$work/$name"
    curl --fail --silent --show-error --location --retry 3 --output "$work/$name.tar" \
        "http://deb.debian.org/debian/pool/main/$url"
    echo "$sha256  $work/$name.tar" | sha256sum --check --quiet
    tar -xf "$work/$name.tar" -C "$work/$name" --strip-components=1
    {
        cmake -S "$work/$name" -B "$work/$name/built" -G Ninja --toolchain "$HVD_TOOLCHAIN" \
            -DCMAKE_INSTALL_PREFIX="$place/libs" -DCMAKE_INSTALL_LIBDIR=lib \
            -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DBUILD_SHARED_LIBS=OFF \
            -DCMAKE_BUILD_TYPE=MinSizeRel -DCMAKE_C_FLAGS="-ffile-prefix-map=$work/=" "$@"
        cmake --build "$work/$name/built" --parallel "$(nproc)"
        cmake --install "$work/$name/built"
    } >"$place/$name.log" 2>&1 || {
        tail -20 "$place/$name.log"
        exit 1
    }
}

stamp="libyaml 0.2.5, jansson 2.14, cmocka 1.1.7, headers of libfabric, glibc $glibc"
if [ "$(cat "$place/libs/version" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$place/libs"
library libyaml liby/libyaml/libyaml_0.2.5.orig.tar.gz \
    fa240dbf262be053f3898006d502d514936c818e422afdcf33921c63bed9bf2e -DBUILD_TESTING=OFF
library jansson j/jansson/jansson_2.14.orig.tar.gz \
    c739578bf6b764aa0752db9a2fdadcfe921c78f1228c7ec0bb47fa804c55d17b \
    -DJANSSON_BUILD_DOCS=OFF -DJANSSON_WITHOUT_TESTS=ON -DJANSSON_EXAMPLES=OFF
library cmocka c/cmocka/cmocka_1.1.7.orig.tar.xz \
    810570eb0b8d64804331f82b29ff47c790ce9cd6b163e98d47a4807047ecad82 \
    -DWITH_EXAMPLES=OFF -DUNIT_TESTING=OFF
cp -r /usr/include/rdma "$place/headers/"
echo "$stamp" >"$place/libs/version"
