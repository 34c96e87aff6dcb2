#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the image of deploy/openpai with buildah and runs tests/openpai/use.sh in it:
#
#   image.sh STORE
#
# STORE becomes a folder with storage of buildah, some gigabytes. The base is made by mmdebstrap, as
# no registry need be there. PyTorch is not in the image but lent to it from .venv (make setup).
# Needs root, and network for packages.
set -euo pipefail
store=$(realpath -m "$1")
mkdir -p "$store"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
base=localhost/openpai-base
image=localhost/horovod-openpai:1.0.0
lent=$(echo "$PWD"/.venv/lib/python3.*/site-packages)

in_store() {
    buildah --root "$store/root" --runroot "$store/run" --storage-driver overlay "$@" </dev/null
}

for program in buildah mmdebstrap; do
    command -v $program >/dev/null || tools/apt-install.sh $program
done
if ! in_store images -q "$base" >/dev/null 2>&1; then
    echo "image: making a base"
    mmdebstrap -q --variant=minbase --include=ca-certificates bookworm "$store/base.tar"
    container=$(in_store from scratch)
    in_store add -q "$container" "$store/base.tar" / >/dev/null
    # Packages may come through a proxy that this machine trusts.
    in_store copy -q "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ >/dev/null
    in_store config --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$container"
    in_store commit -q --rm "$container" "$base" >/dev/null
    rm "$store/base.tar"
fi
echo "image: building $image"
in_store bud --isolation chroot --layers --build-arg "BASE=$base" --build-arg FRAMEWORKS=numpy \
    -t "$image" -f deploy/openpai/Dockerfile . >"$store/build.log" 2>&1 ||
    { tail -n 40 "$store/build.log"; exit 1; }
echo "image: using it"
container=$(in_store from "$image")
trap 'in_store rm "$container" >/dev/null' EXIT
in_store run --isolation chroot -v "$lent:/lent:ro" -v "$PWD/tests/openpai:/tests:ro" \
    --env PYTHONPATH=/lent "$container" bash /tests/use.sh
