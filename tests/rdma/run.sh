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
mkdir -p "$folder/programs"
folder=$(realpath "$folder")
programs=$folder/programs # copies: the guests must not see a build that changes
cp -a "$build"/libhvd.so* "$build/horovodrun" "$build/hvd-info" "$build/tests/test_ops" \
    "$here/cases.sh" "$programs"
cc -std=gnu11 -Wall -Wextra -Werror -I"$here/../../include" "$here/../launchers/launched.c" \
    -L"$programs" -lhvd -Wl,-rpath,"$programs" -o "$programs/launched"
script=$(mktemp)
trap 'rm -f "$script"' EXIT
cat >"$script" <<END
export PROGRAMS=$programs IMPI=$(realpath "$here/../../.venv-launchers/impi")
exec bash $programs/cases.sh $*
END
LIMIT=${LIMIT:-2400} "$here/guests.sh" "$folder" "$script"
