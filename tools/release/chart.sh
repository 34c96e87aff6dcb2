#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The chart as it is published: tools/release/chart.sh CHART FOLDER
#
#   horovod-<version>.tgz        what `helm install` takes; the same bytes from the same files
#   horovod-<version>.tgz.prov   its provenance, if SIGN_KEY names a key of gpg: helm verify
#   horovod-<version>.oci.tar    both as an OCI artefact, which registries keep:
#                                skopeo copy oci-archive:FILE docker://HOST/NAME:VERSION
set -euo pipefail
chart=$(realpath "$1") out=$(realpath "$2")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=$(sed -n 's/^name: //p' "$chart/Chart.yaml")
version=$(sed -n 's/^version: //p' "$chart/Chart.yaml")
package=$out/$name-$version.tgz

# The tests of the chart stay in the source package, as .helmignore would have it.
tar -C "$(dirname "$chart")" --sort=name --owner=0 --group=0 --numeric-owner --format=ustar \
    --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" --exclude "$name/tests" -cf - "$name" |
    gzip -9n >"$package"
if [ -n "${SIGN_KEY:-}" ]; then
    {
        cat "$chart/Chart.yaml"
        printf '\n...\nfiles:\n  %s: sha256:%s\n' "${package##*/}" \
            "$(sha256sum "$package" | cut -d' ' -f1)"
    } | gpg --batch --yes --local-user "$SIGN_KEY" --digest-algo SHA512 --clearsign \
        >"$package.prov"
fi
python3 "$here/oci.py" "$chart/Chart.yaml" "$package" "$out/$name-$version.oci.tar"
