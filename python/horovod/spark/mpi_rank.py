# SPDX-License-Identifier: Apache-2.0
"""What mpirun starts for each rank: python -m horovod.spark.mpi_rank.

It does what a Spark task does (agent.py), but its number is the rank mpirun gave. The rank has
mpirun's environment and can use MPI itself.
"""
import json
import os
import sys

from horovod.spark import agent
from horovod.spark.mpi import LETTER_VARIABLE


def main() -> int:
    letter, devices = json.loads(os.environ.pop(LETTER_VARIABLE))
    with open(os.environ["HOROVOD_RUN_PAYLOAD"]) as file:  # of the agent that runs the daemon
        secret = bytes.fromhex(file.read())
    index = int(os.environ["OMPI_COMM_WORLD_RANK"])
    spec = agent.JobSpec(*letter)._replace(secret=secret)
    return agent.serve(spec, index, 0, devices[index])


if __name__ == "__main__":
    sys.exit(main())
