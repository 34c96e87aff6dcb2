#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make test-release: installs what `make release` has made, where nothing else is. As root; needs
# debootstrap, and for aarch64 qemu-user-static and libc6-arm64-cross.
#
#   PARTS="..."    which of these parts; default: all
#   ubuntu         Ubuntu 20.04 (glibc 2.31): the Debian package, two ranks, a C program, removal
#   debian         Debian 12: the wheel in a new environment, two ranks, removal
#   aarch64        the Debian package unpacked, in an emulator: two ranks, correct sums
#   machine        the wheel here, in an environment of each Python found: tools/test-wheel.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=$(realpath "${OUT:-dist/release}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# expect COUNT PATTERN: so many lines of what was said have it
expect() {
    if [ "$(grep -c "$2" "$work/said")" != "$1" ]; then
        echo "test-release: \"$2\" was to come $1 times" >&2
        exit 1
    fi
}

ubuntu() {
    echo "test-release: Ubuntu 20.04, the Debian package"
    mkdir "$work/focal"
    cp "$out"/horovod-c_*_amd64.deb "$work/focal/horovod-c.deb"
    cp examples/c/allreduce.c "$work/focal/"
    tools/release/in-root.sh focal amd64 gcc,libc6-dev,pkg-config "$work/focal" <<'END' |
ldd --version | head -n 1
dpkg -i /in/horovod-c.deb >/dev/null
horovodrun -np 2 sh -c 'echo rank $HOROVOD_RANK of $HOROVOD_SIZE' | sort
hvd-bench --ranks 2 --op allreduce --bytes 1048576 --max-samples 20
cc /in/allreduce.c $(pkg-config --cflags --libs hvd) -o /tmp/allreduce
horovodrun -np 2 /tmp/allreduce
dpkg -r horovod-c >/dev/null
test ! -e /usr/bin/horovodrun
END
        tee "$work/said"
    expect 2 'rank [01] of 2$'
    expect 2 'rank [01] of 2: 0.5 1.5 2.5 3.5'
    expect 1 correct
}

debian() {
    echo "test-release: Debian 12, the wheel"
    mkdir "$work/bookworm"
    cp "$out"/horovod-*x86_64.whl "$work/bookworm/"
    build-release/venv/bin/pip download -q --disable-pip-version-check --only-binary=:all: \
        --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        -d "$work/bookworm" "$work/bookworm"/horovod-*.whl
    cp tools/release/job.py "$work/bookworm/"
    tools/release/in-root.sh bookworm amd64 python3,python3-venv "$work/bookworm" <<'END' |
python3 -m venv /tmp/new
PATH=/tmp/new/bin:$PATH
pip install -q --no-index --find-links /in horovod
horovodrun -np 2 python /in/job.py
pip uninstall -q -y horovod
test ! -e /tmp/new/bin/horovodrun
END
        tee "$work/said"
    expect 2 'rank [01] of 2: sums are right'
}

aarch64() {
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

machine() {
    WHEEL=$(echo "$out"/horovod-*x86_64.whl) tools/test-wheel.sh
}

for part in ${PARTS:-ubuntu debian aarch64 machine}; do
    $part
done
