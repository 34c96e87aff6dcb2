#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs tests/rdma/cases.sh in two emulated machines with soft-RoCE devices (see guests.sh): the ofi
# transport over the verbs provider, and Intel MPI over verbs. Some minutes; emulation is slow.
#
#   run.sh BUILD [CASE ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=$(realpath "$1")
shift
folder=$here/../../.cache/rdma
mkdir -p "$folder"
script=$(mktemp)
trap 'rm -f "$script"' EXIT
cat >"$script" <<END
export BUILD=$build IMPI=$(realpath "$here/../../.venv-launchers/impi")
exec bash $here/cases.sh $*
END
LIMIT=${LIMIT:-900} "$here/guests.sh" "$folder" "$script"
