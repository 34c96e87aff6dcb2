#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
#
# The first process in a guest of guests.sh: loads modules, lays a writable layer over the host's
# files, makes the RDMA device, runs the script and switches the machine off.
b=/bin/busybox
$b mount -t proc none /proc
$b mount -t sysfs none /sys
$b mount -t devtmpfs none /dev
exec >/dev/ttyS0 2>&1 </dev/null
while read -r module; do
    $b insmod "/modules/$module" 2>/dev/null
done </modules/order
for word in $($b cat /proc/cmdline); do
    case $word in node=*) node=${word#node=} ;; esac
done
nine=trans=virtio,version=9p2000.L,msize=262144
$b mount -t 9p -o ro,cache=loose,$nine root /lower
$b mount -t tmpfs none /upper
$b mkdir -p /upper/files /upper/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work none /new
for folder in dev proc sys share run; do
    $b mkdir -p /new/$folder
done
$b mount -t tmpfs none /new/run
$b mount --move /dev /new/dev
$b mount --move /proc /new/proc
$b mount --move /sys /new/sys
$b mkdir -p /new/dev/shm /new/dev/pts
$b mount -t tmpfs none /new/dev/shm
$b mount -t devpts none /new/dev/pts
$b mount -t 9p -o rw,cache=none,$nine share /new/share
$b cat >/new/run/start <<START
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root NODE=$node
cd /run
hostname node$node
ulimit -l unlimited -n 65536
printf '127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n' >/etc/hosts
wire=\$(ls /sys/class/net | grep -v '^lo\$' | head -1)
ip link set lo up
ip link set \$wire name wire
ip link set wire mtu 9000 up
ip address add 10.77.0.$((node + 1))/24 dev wire
rdma link add rxe0 type rxe netdev wire
mkdir -p /dev/infiniband
for class in /sys/class/infiniband_verbs/uverbs* /sys/class/misc/rdma_cm; do
    [ -f \$class/dev ] && [ ! -e /dev/infiniband/\${class##*/} ] &&
        mknod /dev/infiniband/\${class##*/} c \$(tr : ' ' <\$class/dev)
done
bash /share/script
echo "exit status \$?"
START
$b chroot /new /bin/bash /run/start
$b sync
$b poweroff -f
