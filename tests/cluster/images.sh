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
ubuntu=localhost/ubuntu:24.04

horovod=docker.io/library/horovod-c:1.0.0
spark=docker.io/uber/horovod:0.12.1-tf1.8.0-py3.5
distribution=$store/spark
own=kubernetes/dockerfiles/spark/ubuntu18.04/Dockerfile

# name | folder | file | base | build arguments. The second also stands for the image that the
# chart's first users have in their values. The third is built at the top of a Spark distribution.
# The last is built as far as it goes without the gigabytes of CUDA.
images="
$horovod | . | deploy/docker/Dockerfile | $debian | TORCH_FROM=pypi
$spark | . | deploy/docker/Dockerfile.spark | $horovod |
localhost/spark:latest | $distribution | $own | $horovod |
localhost/horovod:1.0.0-gpu | . | deploy/docker/Dockerfile.gpu | $ubuntu | TORCH=
"
# What must work in each of them.
use='set -eux
test "$(id -u)" = 1000
horovodrun -np 2 --check-build
horovodrun -np 2 sh -c "echo rank \$HOROVOD_RANK of \$HOROVOD_SIZE"
mpirun --version
test -x /usr/sbin/sshd
grep -rqF libfabric.so.1 "$(python3 -c "import horovod; print(horovod.__path__[0])")" # has ofi
ldconfig -p | grep -F libfabric.so.1
if python3 -c "import torch"; then
    horovodrun -np 2 python3 /horovod/examples/pytorch_mnist.py --epochs 1 --limit 1000
fi
if [ -d /opt/spark ]; then
    example=/opt/spark/examples/src/main/python/tensorflow/keras_mnist_advanced_modified.py
    /opt/conda/envs/tf_env/bin/python -c "import tensorflow, keras, torch, h5py, pyarrow, pyspark"
    horovodrun -np 2 /opt/conda/envs/tf_env/bin/python $example --epochs 1
    SPARK_LOCAL_HOSTNAME=localhost /opt/spark/bin/spark-submit --version
    cd && printf "%s\n" "import horovod.spark" "from pyspark.sql import SparkSession" \
        "spark = SparkSession.builder.getOrCreate()" \
        "print(horovod.spark.run(lambda: 7, num_proc=2))" >job.py
    SPARK_LOCAL_HOSTNAME=localhost /opt/spark/bin/spark-submit --master "local[2]" job.py |
        grep -F "[7, 7]"
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
make_base() { # name, suite, other arguments of mmdebstrap
    local name=$1 suite=$2 container
    shift 2
    if bud images -q "$name" >/dev/null 2>&1; then
        return
    fi
    say "mmdebstrap: $name"
    mmdebstrap -q --variant=minbase --include=apt,ca-certificates "$suite" "$store/base.tar" "$@"
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$store/pip.conf"
    container=$(bud from scratch)
    bud add -q "$container" "$store/base.tar" / >/dev/null
    bud copy -q "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ >/dev/null
    bud copy -q "$container" "$store/pip.conf" /etc/pip.conf >/dev/null
    bud commit -q --rm "$container" "$name" >/dev/null
    rm "$store/base.tar"
}

# With the user that Ubuntu's own images have.
make_ubuntu() {
    local archive=archive.ubuntu.com/ubuntu keys=$store/ubuntu-keyring
    if [ ! -d "$keys" ]; then
        curl -fsS -o "$keys.deb" \
            "https://$archive/pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
        dpkg -x "$keys.deb" "$keys"
    fi
    make_base "$ubuntu" noble "http://$archive" --components=main,universe \
        --keyring="$keys/usr/share/keyrings/ubuntu-archive-keyring.gpg" \
        --customize-hook='chroot "$1" useradd --create-home --uid 1000 ubuntu'
}

# From the Spark of the second image: what a distribution has at its top, with our folder, and with
# the example where people are told to put it.
make_distribution() {
    local container at examples
    if [ -d "$distribution/jars" ]; then
        rm -r "$distribution/kubernetes"
    else
        container=$(bud from "$spark")
        at=$(bud mount "$container")
        rm -rf "$distribution" && mkdir "$distribution"
        (cd "$at$(readlink "$at/opt/spark")" &&
            cp -r bin sbin jars data examples python "$distribution")
        bud rm "$container" >/dev/null
    fi
    examples=$distribution/examples/src/main/python/tensorflow
    mkdir -p "$examples"
    cp --remove-destination examples/keras/keras_mnist_advanced_modified.py "$examples"
    cp -r deploy/spark/kubernetes "$distribution"
}

packages
make_base "$debian" bookworm
make_ubuntu
while IFS='|' read -r name folder file base arguments; do
    name=${name// /} folder=${folder// /} file=${file// /} base=${base// /}
    [ -n "$name" ] || continue
    [ "$folder" = . ] || make_distribution
    log=$store/$(basename "$(dirname "$file")").$(basename "$file")
    options=(--build-arg "BASE=$base")
    for argument in $arguments; do
        options+=(--build-arg "$argument")
    done
    say "$file: building $name"
    (cd "$folder" && bud bud --isolation chroot --layers "${options[@]}" -t "$name" -f "$file" .) \
        >"$log.log" 2>&1 || { tail -n 40 "$log.log"; exit 1; }
    say "$file: using it"
    container=$(bud from "$name")
    bud run --isolation chroot "$container" sh -c "$use" >"$log.use.log" 2>&1 ||
        { tail -n 40 "$log.use.log"; exit 1; }
    bud rm "$container" >/dev/null
    if [ -n "$tars" ] && [[ $name != localhost/* ]]; then
        rm -f "$tars/$(basename "$file").tar"
        bud push -q "$name" "docker-archive:$tars/$(basename "$file").tar:$name"
    fi
done <<<"$images"
bud images
