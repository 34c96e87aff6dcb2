#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# HOSTS=a:2,b:2 examples/launch/mpirun.sh: ranks that an mpirun starts, of Open MPI, MPICH or Intel
# MPI. They find each other through it, without horovodrun; Horovod's transports carry the data.
set -eu
n=${N:-2}
exec mpirun -np "$n" ${HOSTS:+-H "$HOSTS"} "${PYTHON:-python}" examples/pytorch_mnist.py --epochs 1
