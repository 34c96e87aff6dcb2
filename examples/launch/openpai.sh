#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# PAI_REST_SERVER=... examples/launch/openpai.sh: the job of deploy/openpai on an OpenPAI cluster;
# checked first, and submitted only if you say so with SUBMIT=1. docs/openpai.md explains it.
set -eu
horovodrun pai check deploy/openpai/job-v2-cpu.yaml
if [ -n "${SUBMIT:-}" ]; then
    horovodrun pai submit deploy/openpai/job-v2-cpu.yaml
fi
