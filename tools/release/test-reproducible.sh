#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the release twice and compares every byte: MACHINES="x86_64 aarch64" as for release.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
OUT=$work/first tools/release/release.sh >"$work/log"
OUT=$work/second tools/release/release.sh >>"$work/log"
diff -r "$work/first" "$work/second"
(cd "$work/first" && wc -c -- *)
echo "two builds, the same bytes"
