#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds Helm 4 as FOLDER/helm, unless it is there: helm4.sh FOLDER
#
# It comes as a Go module only; the build takes some minutes and needs Go 1.24 or newer.
set -euo pipefail
folder=$(realpath -m "$1")
if [ ! -x "$folder/helm" ]; then
    mkdir -p "$folder"
    CGO_ENABLED=0 GOBIN=$folder nice go install -trimpath -ldflags "-s -w" \
        helm.sh/helm/v4/cmd/helm@v4.3.1
fi
