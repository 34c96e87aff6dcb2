#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make test-release: installs what `make release` has made, where nothing else is. As root; needs
# debootstrap, and for aarch64 qemu-user-static and libc6-arm64-cross.
#
#   Ubuntu 20.04   (glibc 2.31) the Debian package: two ranks, a C program against it, removal
#   aarch64        the same package unpacked, in an emulator: two ranks, correct sums
#   this machine   the wheel, in an environment of each Python found: tools/test-wheel.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=$(realpath "${OUT:-dist/release}")
root=$PWD/build-release/focal
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

ubuntu() {
    if [ ! -e "$root/made" ]; then
        rm -rf "$root"
        debootstrap --variant=minbase --no-check-gpg --include=gcc,libc6-dev,pkg-config focal \
            "$root" http://archive.ubuntu.com/ubuntu >"$root.log" 2>&1
        touch "$root/made"
    fi
    cp "$out"/horovod-c_*_amd64.deb "$root/tmp/horovod-c.deb"
    cp examples/c/allreduce.c "$root/tmp/"
    mountpoint -q "$root/dev/shm" || { mkdir -p "$root/dev/shm" &&
        mount -t tmpfs tmpfs "$root/dev/shm"; }
    mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
    trap 'umount "$root/proc" "$root/dev/shm"; rm -rf "$work"' EXIT
    # shellcheck disable=SC2016
    chroot "$root" /bin/sh -euc '
        ldd --version | head -n 1
        dpkg -i /tmp/horovod-c.deb >/dev/null
        horovodrun -np 2 sh -c "echo rank \$HOROVOD_RANK of \$HOROVOD_SIZE" | sort
        hvd-bench --ranks 2 --op allreduce --bytes 1048576 --max-samples 20
        cc /tmp/allreduce.c $(pkg-config --cflags --libs hvd) -o /tmp/allreduce
        horovodrun -np 2 /tmp/allreduce
        dpkg -r horovod-c >/dev/null
        test ! -e /usr/bin/horovodrun' >"$work/said" 2>&1 || { cat "$work/said"; exit 1; }
    cat "$work/said"
    [ "$(grep -c 'rank [01] of 2' "$work/said")" = 2 ] && grep -q correct "$work/said"
}

emulated() {
    local package
    package=$(echo "$out"/horovod-c_*_arm64.deb)
    if [ ! -e "$package" ]; then
        echo "no package for aarch64 in $out: not tested"
        return
    fi
    dpkg-deb -x "$package" "$work/arm64"
    for op in allreduce allgather; do
        qemu-aarch64-static -L /usr/aarch64-linux-gnu "$work/arm64/usr/bin/hvd-bench" --ranks 2 \
            --op $op --bytes 4,65536 --max-samples 5 | tee "$work/said"
        [ "$(grep -c correct "$work/said")" = 2 ]
    done
}

ubuntu
emulated
WHEEL=$(echo "$out"/horovod-*x86_64.whl) tools/test-wheel.sh
