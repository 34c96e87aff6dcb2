# SPDX-License-Identifier: Apache-2.0
"""What mpirun starts for each rank: python -m horovod.spark.mpi_rank.

An agent like that of a Spark task, but its number is the rank mpirun gave. It calls the driver, and
starts the rank, which has mpirun's environment and can use MPI itself.
"""
import os
import sys

from horovod.spark import agent


def main() -> int:
    letter = agent.read_letter()
    index = os.environ["OMPI_COMM_WORLD_RANK"]
    spec = agent.JobSpec(letter["addresses"], letter["port"], bytes.fromhex(letter["secret"]),
                         letter["start_timeout"])
    return agent.serve(spec, int(index), 0, letter["devices"].get(index, []), 1)


if __name__ == "__main__":
    sys.exit(main())
