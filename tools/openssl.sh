#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the OpenSSL that goes into the wheel, as static libraries: tools/openssl.sh PREFIX
#
# Why not the system's: the wheel carries its own in any case, and since 3.1 AES-GCM uses the wide
# AES instructions, which makes encryption about three times as fast as with the 3.0 of Debian 12.
# Only what TLS 1.3 with a pre-shared key needs is built, and what libcurl needs for HTTPS (TLS 1.2
# and 1.3, certificates with RSA or elliptic curves). It reads no configuration file, and the folder
# in which it would look for one cannot be made by anybody. The source comes from crates.io, where
# it is kept for users of Rust, and is checked against its hash.
set -euo pipefail

version=300.6.1+3.6.3
sha256=46eb8fb9fb3b61ce1c0f8a026c4c1a0714d3a9e138e7fbde78753ce2babc3846
prefix=$(realpath -m "$1")
nowhere=/dev/null/openssl
stamp=$prefix/version
built="$version at $nowhere"
machine=${HVD_MACHINE:-$(uname -m)} # tools/release builds for others, with its own CC, AR, RANLIB

if [ "$(cat "$stamp" 2>/dev/null)" = "$built" ]; then
    exit 0
fi
case $machine in
x86_64) target=linux-x86_64 ;;
aarch64) target=linux-aarch64 ;;
*) target= ;; # OpenSSL finds out
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "fetching OpenSSL ${version#*+}"
curl --fail --silent --show-error --location --retry 3 --output "$work/source" \
    "https://static.crates.io/crates/openssl-src/openssl-src-$version.crate"
echo "$sha256  $work/source" | sha256sum --check --quiet
tar -xzf "$work/source" -C "$work" --strip-components=1
cd "$work/openssl"
echo "building it (a few minutes; log: $prefix.log)"
mkdir -p "$(dirname "$prefix")"
{
    ./Configure $target --prefix=$nowhere --openssldir=$nowhere --libdir=lib --release \
        no-autoload-config no-shared no-apps no-tests no-docs no-legacy no-engine no-dso \
        no-comp no-async no-dtls no-srp no-ssl3 no-tls1 no-tls1_1 no-aria no-bf no-camellia \
        no-cast no-cmp no-cms no-ct no-des no-dsa no-ec2m \
        no-gost no-http no-idea no-md4 no-mdc2 no-ml-dsa no-ml-kem no-ocb no-ocsp no-quic no-rc2 \
        no-rc4 no-rmd160 no-scrypt no-seed no-siphash no-siv no-slh-dsa no-sm2 no-sm3 no-sm4 \
        no-ts no-whirlpool
    make -j "$(nproc)" build_libs
    make install_dev DESTDIR="$work/installed"
    rm -rf "$prefix"
    mv "$work/installed$nowhere" "$prefix"
} >"$prefix.log" 2>&1 || {
    tail -20 "$prefix.log"
    exit 1
}
echo "$built" >"$stamp"
