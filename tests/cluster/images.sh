#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the images of deploy/docker with buildah, as on any machine but for the base, which
# mmdebstrap makes since no registry need be there, and uses each as its own user:
#
#   images.sh STORE [TARS]
#
# STORE becomes a folder with buildah's storage, TARS one with a tar of each image for the cluster,
# several gigabytes. Needs root.
set -euo pipefail
store=$(realpath -m "$1")
tars=${2:+$(realpath -m "$2")}
mkdir -p "$store" ${tars:+"$tars"}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
debian=localhost/debian:12-slim

# name | file of deploy/docker | base | build arguments. The second also stands for the image that
# the chart's first users have in their values. The last is built as far as it goes without the
# base and the gigabytes of CUDA.
images="
docker.io/horovod/horovod:1.0.0             | Dockerfile       | $debian          | TORCH_FROM=pypi
docker.io/uber/horovod:0.12.1-tf1.8.0-py3.5 | Dockerfile.spark | docker.io/horovod/horovod:1.0.0 |
localhost/horovod:1.0.0-gpu                 | Dockerfile.gpu   | $debian          | TORCH=
"
# What must work in each of them.
use='set -eux
test "$(id -u)" = 1000
horovodrun -np 2 --check-build
horovodrun -np 2 sh -c "echo rank \$HOROVOD_RANK of \$HOROVOD_SIZE"
mpirun --version
test -x /usr/sbin/sshd
if python3 -c "import torch"; then
    horovodrun -np 2 python3 /horovod/examples/pytorch_mnist.py --epochs 1 --limit 1000
fi
if [ -d /opt/spark ]; then
    example=/opt/spark/examples/src/main/python/tensorflow/keras_mnist_advanced_modified.py
    /opt/conda/envs/tf_env/bin/python -c "import tensorflow, keras, torch, h5py, pyarrow, pyspark"
    horovodrun -np 2 /opt/conda/envs/tf_env/bin/python $example --epochs 1
    SPARK_LOCAL_HOSTNAME=localhost /opt/spark/bin/spark-submit --version
fi'

say() {
    printf '[%s] %s\n' "$(date +%T)" "$*"
}

packages() {
    local missing=() package
    for package in buildah mmdebstrap; do
        command -v $package >/dev/null || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] || tools/apt-install.sh "${missing[@]}"
}

bud() {
    buildah --root "$store/root" --runroot "$store/run" --storage-driver overlay "$@" </dev/null
}

# With this machine's certificates and pip settings: packages may come through a proxy.
make_base() {
    local container
    if bud images -q "$debian" >/dev/null 2>&1; then
        return
    fi
    say "base: mmdebstrap"
    mmdebstrap -q --variant=minbase --include=ca-certificates bookworm "$store/base.tar"
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$store/pip.conf"
    container=$(bud from scratch)
    bud add -q "$container" "$store/base.tar" / >/dev/null
    bud copy -q "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ >/dev/null
    bud copy -q "$container" "$store/pip.conf" /etc/pip.conf >/dev/null
    bud commit -q --rm "$container" "$debian" >/dev/null
    rm "$store/base.tar"
}

packages
make_base
while IFS='|' read -r name file base arguments; do
    name=${name// /} file=${file// /} base=${base// /}
    [ -n "$name" ] || continue
    options=(--build-arg "BASE=$base")
    for argument in $arguments; do
        options+=(--build-arg "$argument")
    done
    say "$file: building $name"
    bud bud --isolation chroot --layers "${options[@]}" -t "$name" -f "deploy/docker/$file" . \
        >"$store/$file.log" 2>&1 || { tail -n 40 "$store/$file.log"; exit 1; }
    say "$file: using it"
    container=$(bud from "$name")
    bud run --isolation chroot "$container" sh -c "$use" >"$store/$file.use.log" 2>&1 ||
        { tail -n 40 "$store/$file.use.log"; exit 1; }
    bud rm "$container" >/dev/null
    if [ -n "$tars" ] && [[ $name != localhost/* ]]; then
        rm -f "$tars/$file.tar"
        bud push -q "$name" "docker-archive:$tars/$file.tar:$name"
    fi
done <<<"$images"
bud images
