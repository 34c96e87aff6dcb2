#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the libcurl that horovodrun uses, as a static library: tools/curl.sh PREFIX [OPENSSL]
# with the system's OpenSSL, or with the one that tools/openssl.sh has built in that prefix.
#
# Why not the system's libcurl: the wheel needs nothing installed, and some thirty libraries that it
# brings would be loaded by every horovodrun and every agent, which takes longer than all the rest
# of their start. What is built speaks HTTP and HTTPS, also through a proxy, and nothing else. Where
# a system keeps its certificates is not built in: src/pai/http.c looks for them. The source comes
# from crates.io, where it is kept for users of Rust, and is checked against its hash.
set -euo pipefail

version=0.4.91+curl-8.22.0
sha256=cd39579123e45bf762716bb893d43886ed1cabe6289455be29a4f1d4e37afb06
prefix=$(realpath -m "$1")
openssl=${2:+$(realpath "$2")}
stamp=$prefix/version
openssl_version=$(cat "$openssl/version" 2>/dev/null || pkg-config --modversion openssl)
built="$version, no paths, with $openssl_version"

if [ "$(cat "$stamp" 2>/dev/null)" = "$built" ]; then
    exit 0
fi
options=(
    -DBUILD_CURL_EXE=OFF -DBUILD_EXAMPLES=OFF -DBUILD_LIBCURL_DOCS=OFF -DBUILD_MISC_DOCS=OFF
    -DBUILD_SHARED_LIBS=OFF -DBUILD_TESTING=OFF -DCMAKE_BUILD_TYPE=MinSizeRel
    -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCURL_DROP_UNUSED=ON
    -DENABLE_CURL_MANUAL=OFF
    -DHTTP_ONLY=ON -DCURL_CA_BUNDLE=none -DCURL_CA_PATH=none
    -DCURL_USE_OPENSSL=ON ${openssl:+-DOPENSSL_ROOT_DIR="$openssl"}
    -DCURL_DISABLE_OPENSSL_AUTO_LOAD_CONFIG=ON
    ${HVD_TOOLCHAIN:+--toolchain "$HVD_TOOLCHAIN"} # tools/release builds for other machines
)
# Whatever else it would use if it were installed here, or need not be able to do.
for library in CURL_BROTLI CURL_USE_LIBPSL CURL_USE_LIBSSH2 CURL_USE_PKGCONFIG CURL_ZLIB \
    CURL_ZSTD USE_LIBIDN2 USE_NGHTTP2; do
    options+=("-D$library=OFF")
done
for feature in ALTSVC AWS COOKIES DIGEST_AUTH DOH GETOPTIONS HEADERS_API HSTS KERBEROS_AUTH MIME \
    NEGOTIATE_AUTH NETRC PROGRESS_METER WEBSOCKETS; do
    options+=("-DCURL_DISABLE_$feature=ON")
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "fetching libcurl ${version#*curl-}"
curl --fail --silent --show-error --location --retry 3 --output "$work/source" \
    "https://static.crates.io/crates/curl-sys/curl-sys-$version.crate"
echo "$sha256  $work/source" | sha256sum --check --quiet
tar -xzf "$work/source" -C "$work" --strip-components=1
mkdir -p "$work/curl/docs" "$(dirname "$prefix")"
touch "$work/curl/docs/CMakeLists.txt" # left out there, but asked for
echo "building it (half a minute; log: $prefix.log)"
{
    cmake -S "$work/curl" -B "$work/build" -G Ninja -DCMAKE_INSTALL_PREFIX="$prefix" \
        -DCMAKE_C_FLAGS="-ffile-prefix-map=$work/=" "${options[@]}"
    cmake --build "$work/build" --parallel "$(nproc)"
    cmake --install "$work/build"
} >"$prefix.log" 2>&1 || {
    tail -20 "$prefix.log"
    exit 1
}
echo "$built" >"$stamp"
