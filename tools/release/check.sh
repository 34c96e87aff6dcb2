#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks what tools/release/release.sh has made: tools/release/check.sh FOLDER
#
# The sums; metadata and description (twine); wheels: what they link (auditwheel), the limited API
# (abi3audit), their size, the machine they are for, hardening, paths of this machine; the list of
# components against its schema.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(realpath "$1")
bin=$PWD/build-release/venv/bin
most_bytes=6000000

(cd "$out" && sha256sum --check --quiet SHA256SUMS)
"$bin/twine" check --strict "$out"/*.whl "$out"/*.tar.gz
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for wheel in "$out"/*.whl; do
    machine=${wheel##*manylinux_2_28_}
    machine=${machine%.whl}
    bytes=$(stat -c %s "$wheel")
    if [ "$bytes" -gt $most_bytes ]; then
        echo "$wheel: $bytes bytes, more than $most_bytes" >&2
        exit 1
    fi
    said=$("$bin/auditwheel" show "$wheel" | tr '\n' ' ')
    tag=$(grep -oE 'following platform tag: *"manylinux_2_[0-9]+' <<<"$said" | grep -oE '[0-9]+$')
    if [ -z "$tag" ] || [ "$tag" -gt 28 ]; then
        echo "$wheel: not for glibc 2.28: $said" >&2
        exit 1
    fi
    "$bin/abi3audit" --strict --assume-minimum-abi3 3.11 "$wheel"
    "$bin/python" -m zipfile -e "$wheel" "$work/$machine"
    mapfile -t binaries < <(find "$work/$machine" -name '*.so*' -o -name horovodrun)
    for binary in "${binaries[@]}"; do
        readelf -h "$binary" | grep -qi "machine:.*${machine/_/[-_]}" || {
            echo "$binary is not for $machine" >&2
            exit 1
        }
    done
    # Extensions look for libhvd.so.1 beside them, which counts as a search path of their own.
    mapfile -t hardened < <(find "$work/$machine" -name 'libhvd.so*' -o -name horovodrun)
    tools/check-hardening "${hardened[@]}"
    echo "${wheel##*/}: $bytes bytes, manylinux_2_$tag"
done
tools/check-paths "$out"/*.whl
"$bin/python" - "$out"/*.cdx.json <<'END'
import pathlib
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(pathlib.Path(sys.argv[1]).read_text())
sys.exit(f"sbom: {found}" if found else 0)
END
echo "release: every check passed"
