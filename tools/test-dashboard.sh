#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make test-dashboard: the job page in a real Chromium; pictures in build/dashboard.
#
#   ARGUMENTS=...   what to run of it, as Browser.test_stall
#   --pictures      no tests: makes the pictures in docs/img anew
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=build/dashboard/venv
command -v chromium >/dev/null || tools/apt-install.sh chromium fonts-dejavu-core
if [ ! -x $environment/bin/python ]; then
    python3 -m venv $environment
    $environment/bin/python -m pip install -q --disable-pip-version-check playwright
fi
if [ "${1:-}" = --pictures ]; then
    exec $environment/bin/python tests/dashboard/pictures.py build docs/img
fi
# shellcheck disable=SC2086 # several arguments
$environment/bin/python tests/dashboard/test_browser.py build build/dashboard ${ARGUMENTS:-}
