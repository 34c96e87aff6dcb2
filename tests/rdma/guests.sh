#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Two emulated machines with a soft-RoCE device each (rdma_rxe), on a network of their own: real
# verbs on hosts that have none. Their file system is this one, read-only, under a layer in memory,
# so programs are where they are here.
#
#   guests.sh FOLDER SCRIPT
#
# FOLDER keeps the kernel between runs and is /share in both. SCRIPT is run by root in both at once,
# with NODE=0 or 1; its last line there is "exit status N". Both outputs are shown when both have
# ended, or after LIMIT seconds (600); the exit status says whether both were 0. No root is needed.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
script=$(realpath "$2")
limit=${LIMIT:-600}
kernel=$folder/kernel

# The kernel of the distribution, unpacked without installing it.
if ! compgen -G "$kernel/image/boot/vmlinuz-*" >/dev/null; then
    mkdir -p "$kernel"
    (
        cd "$kernel"
        image=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ {print $2; exit}')
        apt-get download -q "$image" busybox-static >/dev/null
        dpkg -x linux-image-*.deb image
        dpkg -x busybox-static_*.deb busybox
        rm -f ./*.deb
    )
fi
version=$(basename "$kernel"/image/boot/vmlinuz-* | sed 's/^vmlinuz-//')
/sbin/depmod -b "$kernel/image" "$version"

# A first file system in memory: busybox, the modules in the order they are loaded, and init.
first=$kernel/first
rm -rf "$first"
mkdir -p "$first"/{bin,modules,dev,proc,sys,new,lower,upper}
cp "$(find "$kernel/busybox" -path '*bin/busybox' -type f)" "$first/bin/busybox"
for module in virtio_pci 9pnet_virtio 9p overlay virtio_net virtio_rng crc32c_generic \
              crc32_pclmul ib_uverbs rdma_ucm rdma_rxe; do
    /sbin/modprobe -d "$kernel/image" -S "$version" --show-depends "$module" 2>/dev/null |
        awk '$1 == "insmod" {print $2}'
done | awk '!seen[$0]++' | while read -r file; do
    cp "$file" "$first/modules/"
    basename "$file"
done >"$first/modules/order"
cp "$(dirname "${BASH_SOURCE[0]}")/guest_init.sh" "$first/init"
chmod +x "$first/init"
(cd "$first" && find . | cpio -o -H newc --quiet | gzip -1) >"$kernel/first.gz"

share=$folder/share
rm -rf "$share" "$folder/network" "$folder"/node?.log
mkdir -p "$share"
cp "$script" "$share/script"

guest() { # node, which end of the network
    local nine=security_model=none,multidevs=remap
    exec timeout "$limit" qemu-system-x86_64 -machine q35,accel=tcg -cpu max -smp 1 -m 1024 \
        -nodefaults -no-reboot -display none \
        -kernel "$kernel/image/boot/vmlinuz-$version" -initrd "$kernel/first.gz" \
        -append "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off no_timer_check node=$1" \
        -chardev "file,id=console,path=$folder/node$1.log" -serial chardev:console \
        -object rng-random,id=random,filename=/dev/urandom -device virtio-rng-pci,rng=random \
        -fsdev "local,id=root,path=/,readonly=on,$nine" \
        -device virtio-9p-pci,fsdev=root,mount_tag=root \
        -fsdev "local,id=share,path=$share,$nine" \
        -device virtio-9p-pci,fsdev=share,mount_tag=share \
        -netdev "stream,id=wire,addr.type=unix,addr.path=$folder/network,server=$2" \
        -device "virtio-net-pci,netdev=wire,mac=52:54:00:77:00:0$1,host_mtu=9000"
}

guest 0 on &
guests=$!
for _ in $(seq 100); do
    [ -S "$folder/network" ] && break
    sleep 0.1
done
guest 1 off &
wait "$guests" "$!" || true
status=0
for node in 0 1; do
    echo "--- node$node"
    tr -d '\r' <"$folder/node$node.log"
    grep -q '^exit status 0' "$folder/node$node.log" || status=1
done
exit "$status"
