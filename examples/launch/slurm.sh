#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# sbatch examples/launch/slurm.sh: a rank on each task of the allocation. horovodrun reads the hosts
# from Slurm and starts its agents over ssh; the last line, instead, has srun start the ranks.
#SBATCH --job-name=horovod
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:10:00
horovodrun "${PYTHON:-python}" examples/pytorch_mnist.py --epochs 1
# srun "${PYTHON:-python}" examples/pytorch_mnist.py --epochs 1
