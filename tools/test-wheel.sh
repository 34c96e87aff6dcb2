#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make test-wheel: the wheel of dist/ as users get it. Each Python found gets an environment with
# nothing but the wheel; there it must install, be small, and run a job of two ranks. Its horovodrun
# needs no library but the system's own, and talks to servers over HTTPS with the one inside.
#
#   WHEEL=FILE               another one than that of dist/
#   PYTHONS="python3.11 ..."  which (default: those of 3.11 to 3.13 that are there, pyenv's too)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

limit_bytes=$((5 * 1000 * 1000))
limit_seconds=10 # to install; the wheels it depends on are fetched before

pythons() {
    local minor python
    for minor in 11 12 13; do
        for python in "python3.$minor" "$HOME"/.pyenv/versions/3."$minor".*/bin/python3."$minor"; do
            if "$python" -c "import venv" 2>/dev/null; then
                echo "$python"
                break
            fi
        done
    done
}

wheel=${WHEEL:-$(echo dist/horovod-*.whl)}
if [ ! -e "$wheel" ]; then
    echo "dist/ has no wheel, or several; try: make wheel" >&2
    exit 1
fi
bytes=$(stat -c %s "$wheel")
echo "$wheel: $bytes bytes"
[ "$bytes" -le "$limit_bytes" ] || { echo "more than $limit_bytes bytes" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat >"$scratch/job.py" <<'END'
import packaging.version
import horovod
from horovod import _core
from horovod.common import basics

assert packaging.version.Version(horovod.__version__) >= packaging.version.Version("0.15.3")
basics.init()
memory = bytearray([basics.rank() + 1] * 8)
_core.submit(op=_core.ALLREDUCE, name="x", dtype=_core.UINT8, inputs=memory, outputs=memory).wait()
assert memory == bytearray([3] * 8), memory
basics.shutdown()
print("rank", "done", flush=True)
END
for python in ${PYTHONS:-$(pythons)}; do
    environment=$scratch/$("$python" -c 'import sys; print("venv%d.%d" % sys.version_info[:2])')
    "$python" -m venv "$environment"
    "$environment"/bin/python -m pip download -q --disable-pip-version-check -d "$scratch/wheels" \
        "$wheel"
    seconds=$SECONDS
    "$environment"/bin/python -m pip install -q --disable-pip-version-check --no-index \
        --find-links "$scratch/wheels" "$wheel"
    seconds=$((SECONDS - seconds))
    # Away from the sources, so that what was installed is what runs.
    output=$(cd "$scratch" && "$environment"/bin/horovodrun -np 2 "$environment"/bin/python job.py)
    [ "$(grep -c 'rank done' <<<"$output")" = 2 ] || { echo "$output" >&2; exit 1; }
    echo "$("$environment"/bin/python --version): installed in $seconds s, ran on two ranks"
    if [ "$seconds" -gt "$limit_seconds" ]; then
        echo "slower than $limit_seconds s; was the machine busy?" >&2
    fi
done
needed=$(readelf -d "$environment/bin/horovodrun" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
if grep -Ev '^(libc|ld-linux.*)\.so\.[0-9]+$' <<<"$needed"; then
    echo "horovodrun needs these libraries installed" >&2
    exit 1
fi
python3 tests/launch/test_pai.py "$environment/bin"
