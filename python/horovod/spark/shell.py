# SPDX-License-Identifier: Apache-2.0
"""mpirun's remote shell: python -m horovod.spark.shell HOST COMMAND...

mpirun believes it calls ssh. The command goes to the driver, and from there to a Spark task on that
host; what it writes comes back the same way, and its exit status is ours.
"""
import sys
import time

from horovod.spark import agent, rank
from horovod.spark.line import Kind, dial, wait


def main() -> int:
    letter = agent.read_letter()
    line = dial(letter["addresses"], letter["port"], bytes.fromhex(letter["secret"]),
                time.monotonic() + letter["start_timeout"])
    line.post_json(Kind.SHELL, {"host": sys.argv[1], "command": " ".join(sys.argv[2:])})
    streams = {Kind.STDOUT: 1, Kind.STDERR: 2}
    while True:
        line.push()
        wait(line, 1.0)
        for kind, payload in line.pump():
            if kind == Kind.ENDED:
                return int(payload)
            if kind == Kind.LEAVE:
                return 1
            rank.write_all(streams[Kind(kind)], payload)


if __name__ == "__main__":
    sys.exit(main())
