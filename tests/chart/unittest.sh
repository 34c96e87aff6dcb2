#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the suites of charts/horovod/tests with helm-unittest: unittest.sh FOLDER
#
# helm-unittest comes as a Go module only; it is built into FOLDER the first time, which takes some
# minutes and needs Go 1.24 or newer.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(realpath -m "$1")
module=github.com/helm-unittest/helm-unittest@v1.1.2
export CGO_ENABLED=0
mkdir -p "$folder"

# Its module replaces another, which go install refuses: built in a copy of its folder.
if [ ! -x "$folder/untt" ]; then
    source=$(cd "$folder" && go mod download -json "$module" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    copy=$(mktemp -d)
    trap 'rm -rf "$copy"' EXIT
    cp -r "$source/." "$copy"
    chmod -R u+w "$copy"
    (cd "$copy" && go build -trimpath -ldflags "-s -w" -o "$folder/untt" ./cmd/helm-unittest)
fi
"$folder/untt" "$here/../../charts/horovod"
