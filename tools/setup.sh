#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a fresh Debian 12 machine ready, and does nothing on one that is: installs what is missing,
# makes .venv with what the Python tests need (PyTorch without its GPU parts among it), puts a small
# libcurl into build-curl/, configures and builds build/, which .venv then sees as the package
# horovod. Needs root, or sudo, only when something is missing.
#
#   tools/setup.sh             everything
#   tools/setup.sh --no-build  packages and .venv only
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# package | command that succeeds when it is there
needs='
gcc                 | command -v gcc
binutils            | command -v readelf
libc6-dev           | test -e /usr/include/stdio.h
make                | command -v make
clang               | command -v clang
libclang-rt-14-dev  | test -e "$(clang -print-file-name=libclang_rt.asan-$(uname -m).a)"
cmake               | command -v cmake
ninja-build         | command -v ninja
pkg-config          | command -v pkg-config
libssl-dev          | pkg-config --exists "openssl >= 3"
libfabric-dev       | test -e /usr/include/rdma/fabric.h
libyaml-dev         | test -e /usr/include/yaml.h
libjansson-dev      | test -e /usr/include/jansson.h
libcmocka-dev       | pkg-config --exists cmocka
valgrind            | command -v valgrind
python3             | command -v python3
python3-dev         | has_python_header
python3-venv        | python3 -c "import ensurepip, venv"
openssl             | command -v openssl
curl                | command -v curl
perl                | perl -MFindBin -e 1
openssh-client      | command -v ssh-keygen
openssh-server      | test -x /usr/sbin/sshd
iproute2            | PATH=$PATH:/sbin:/usr/sbin command -v ip
nftables            | PATH=$PATH:/sbin:/usr/sbin command -v nft
'

has_python_header() {
    local include
    include=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')
    test -e "$include/Python.h"
}

missing_packages() {
    local package check
    while IFS='|' read -r package check; do
        if [ -n "$check" ] && ! eval "$check" >/dev/null 2>&1; then
            echo "$package" | tr -d ' '
        fi
    done <<<"$needs"
}

mapfile -t missing < <(missing_packages)
if [ "${#missing[@]}" -gt 0 ]; then
    tools/apt-install.sh "${missing[@]}"
    mapfile -t missing < <(missing_packages)
    if [ "${#missing[@]}" -gt 0 ]; then
        echo "setup: still missing after installing: ${missing[*]}" >&2
        exit 1
    fi
fi

if ! .venv/bin/python -c '' 2>/dev/null; then
    echo "setup: making .venv"
    python3 -m venv --clear .venv
fi
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$PWD/build/python" >"$site/horovod-build.pth"
if ! cmp -s tools/requirements.txt .venv/requirements.txt; then
    echo "setup: installing Python packages"
    .venv/bin/python -m pip install -q --disable-pip-version-check -r tools/requirements.txt
    cp tools/requirements.txt .venv/requirements.txt
fi
.venv/bin/python tools/install-torch.py
tools/curl.sh build-curl

if [ "${1:-}" != --no-build ]; then
    tools/build.sh build
fi
