#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the shell script on standard input in an empty system, as root:
#
#   tools/release/in-root.sh SUITE ARCHITECTURE PACKAGE,... FOLDER <script
#
# SUITE is Ubuntu's focal or one of Debian's. The system is made by debootstrap, with these packages
# only, and kept in build-release/SUITE-ARCHITECTURE; FOLDER is /in there. One for another machine
# needs qemu-user-static, with binfmt_misc to start its programs.
set -euo pipefail
suite=$1 architecture=$2 packages=$3 folder=$(realpath "$4")
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")/build-release/$suite-$architecture
case $suite in
focal) mirror=http://archive.ubuntu.com/ubuntu ;;
*) mirror=http://deb.debian.org/debian ;;
esac

if [ "$architecture" != "$(dpkg --print-architecture)" ]; then
    mountpoint -q /proc/sys/fs/binfmt_misc ||
        mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    if ! grep -qs enabled /proc/sys/fs/binfmt_misc/qemu-aarch64; then
        echo "in-root: programs of $architecture do not start here; install qemu-user-static and" \
            "binfmt-support" >&2
        exit 1
    fi
fi
if [ "$(cat "$root/made" 2>/dev/null)" != "$packages" ]; then
    rm -rf "$root"
    mkdir -p "$root"
    debootstrap --variant=minbase --no-check-gpg --arch="$architecture" --include="$packages" \
        "$suite" "$root" "$mirror" >"$root.log" 2>&1 || {
        tail -20 "$root.log" >&2
        exit 1
    }
    echo "$packages" >"$root/made"
fi
mkdir -p "$root/in" "$root/dev/shm"
# Mounts of a namespace of their own, which end with it.
exec unshare --mount --pid --fork sh -euc '
    mount --bind "$1" "$0/in"
    mount -t proc proc "$0/proc"
    mount -t tmpfs tmpfs "$0/dev/shm"
    mount -t tmpfs tmpfs "$0/tmp"
    exec chroot "$0" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root /bin/sh -eu
' "$root" "$folder"
