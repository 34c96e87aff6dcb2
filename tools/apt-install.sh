#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs packages of Debian, as root or with sudo: apt-install.sh PACKAGE ...
#
# Tests start daemons of their own; those of the packages do not start by themselves.
set -euo pipefail
if ! command -v apt-get >/dev/null; then
    echo "setup: missing: $*; this is not a Debian system, please install them by hand" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "setup: missing: $*; run as root: apt-get install $*" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "setup: installing $*"
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -q -y \
    -o DPkg::Lock::Timeout=600 --no-install-recommends "$@" </dev/null
