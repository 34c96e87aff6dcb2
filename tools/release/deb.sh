#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The C part as a Debian package: tools/release/deb.sh MACHINE TREE FOLDER CMAKE_DEFINITION...
#
# Library, header, pkg-config file, programs, manual page. It needs no package but the C library;
# the others are linked in. Debian and Ubuntu with glibc 2.28 or later take it.
set -euo pipefail

machine=$1 tree=$2 out=$3
shift 3
declare -A architectures=([x86_64]=amd64 [aarch64]=arm64)
architecture=${architectures[$machine]}
here=$(dirname "${BASH_SOURCE[0]}")/../../build-release/$machine
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$tree/pyproject.toml")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
    cmake -S "$tree" -B "$work/build" -G Ninja "${@/#/-D}" -DCMAKE_INSTALL_PREFIX=/usr \
        -DCMAKE_INSTALL_LIBDIR="lib/$machine-linux-gnu" -DHVD_TESTS=OFF -DHVD_PYTHON=OFF
    cmake --build "$work/build" --parallel "$(nproc)" --target hvd horovodrun hvd-info hvd-bench
    DESTDIR=$work/root cmake --install "$work/build"
} >"$here/deb.log" 2>&1 || {
    tail -30 "$here/deb.log"
    exit 1
}
root=$work/root
documents=$root/usr/share/doc/horovod-c
mkdir -p "$root/DEBIAN" "$documents" "$root/usr/share/man/man1"
cp "$tree/LICENSE" "$documents/copyright"
gzip -9n <"$tree/CHANGELOG.md" >"$documents/changelog.gz"
# Programs for another machine print their pages in an emulator: qemu-user-static, and
# libc6-arm64-cross for its C library.
run=()
if [ "$machine" != "$(uname -m)" ]; then
    run=("qemu-$machine-static" -L "/usr/$machine-linux-gnu")
fi
for program in horovodrun hvd-info hvd-bench; do
    page=$("${run[@]}" "$root/usr/bin/$program" --man-page 2>/dev/null) || true
    if grep -q '^\.TH' <<<"$page"; then
        gzip -9n <<<"$page" >"$root/usr/share/man/man1/$program.1.gz"
    elif [ $program = horovodrun ]; then
        echo "$program for $machine prints no manual page here; install qemu-user-static and" \
            "libc6-arm64-cross" >&2
        exit 1
    fi
done
cat >"$root/DEBIAN/control" <<END
Package: horovod-c
Version: $version-1
Architecture: $architecture
Maintainer: ${MAINTAINER:-an unpublished build <root@localhost>}
Installed-Size: $(du -k -s --exclude DEBIAN --apparent-size "$root" | cut -f1)
Depends: libc6 (>= 2.28)
Suggests: openssh-client
Section: libs
Priority: optional
Description: collectives between the processes of a distributed training job
 The library libhvd with its header and pkg-config file, the launcher horovodrun, and the programs
 hvd-info and hvd-bench. The Python package horovod has its own copy and does not need this one.
END
(cd "$root" && find usr -type f | sort | xargs md5sum >DEBIAN/md5sums)
find "$root" -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group -Zxz -z6 --build "$root" \
    "$out/horovod-c_$version-1_$architecture.deb" >/dev/null
