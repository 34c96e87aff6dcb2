#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what tests/rdma/run.sh needs beside tools/setup.sh: an emulator with a kernel that has
# soft-RoCE, the user side of verbs, and Intel MPI from PyPI (below .venv-launchers/, where
# tests/foreign_launchers/setup.sh has it too). Does nothing where all is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# package | file that is there when it is
needs='
qemu-system-x86     | /usr/bin/qemu-system-x86_64
kmod                | /usr/sbin/modprobe
cpio                | /usr/bin/cpio
iproute2            | /usr/bin/rdma
libibverbs1         | /usr/lib/*/libibverbs.so.1
librdmacm1          | /usr/lib/*/librdmacm.so.1
ibverbs-providers   | /usr/lib/*/libibverbs/librxe-rdmav34.so
openssh-server      | /usr/sbin/sshd
'

missing=()
while IFS='| ' read -r package file; do
    if [ -n "$package" ] && ! compgen -G "$file" >/dev/null; then
        missing+=("$package")
    fi
done <<<"$needs"
if [ "${#missing[@]}" -gt 0 ]; then
    tools/apt-install.sh "${missing[@]}"
fi
if ! [ -x .venv-launchers/impi/bin/mpiexec.hydra ]; then
    echo "setup: installing Intel MPI"
    python3 -m venv --clear .venv-launchers/impi
    .venv-launchers/impi/bin/pip install -q impi-rt==2021.18.1
fi
