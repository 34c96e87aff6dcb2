# SPDX-License-Identifier: Apache-2.0
"""The picture of the documentation, typed into a real interactive pyspark shell, line by line."""
import os
import pathlib
import pty
import re
import select
import subprocess
import sys
import time

import hosts
import pyspark
import pytest
from test_hosts import cluster  # noqa: F401

PICTURE = (pathlib.Path(__file__).parent / "picture.txt").read_text()
PYSPARK = os.path.join(os.path.dirname(pyspark.__file__), "bin", "pyspark")
PROMPTS = (">>> ", "... ")
PATIENCE_SECONDS = 300


class Shell:
    """A terminal with a program in it."""

    def __init__(self, command, environment):
        self._fd, end = pty.openpty()
        self._seen = ""
        self._process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, start_new_session=True,
            env={**environment, "TERM": "dumb", "INPUTRC": "/dev/null", "COLUMNS": "80",
                 "PYSPARK_DRIVER_PYTHON": sys.executable, "PYTHON_BASIC_REPL": "1"})
        os.close(end)

    def read_to_prompt(self):
        """What has come up to the next prompt, and it, as it stands on the screen."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._seen.endswith(PROMPTS):
            ready, _, _ = select.select([self._fd], [], [], deadline - time.monotonic())
            assert ready, f"no prompt in time: {self._seen}"
            self._seen += os.read(self._fd, 65536).decode()
        seen, self._seen = self._seen, ""
        return [on_screen(line) for line in seen.replace("\r\n", "\n").split("\n")]

    def type(self, line):
        os.write(self._fd, line.encode() + b"\n")

    def close(self):
        os.write(self._fd, b"\x04")
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()
            os.close(self._fd)


def on_screen(line):
    """What a line shows after its carriage returns: later letters cover earlier ones."""
    shown = ""
    for piece in line.split("\r"):
        shown = piece + shown[len(piece):]
    return shown.rstrip()


def picture_typed_into(shell):
    """What is to be seen after the last line typed, and what is."""
    lines = PICTURE.rstrip("\n").split("\n")
    typed = [line[4:] for line in lines[:-1] if line.startswith((">>>", "..."))]
    shell.read_to_prompt()  # the welcome
    for line in typed:
        shell.type(line)
        seen = shell.read_to_prompt()
    return lines[len(typed):], seen[1:]  # the first is what was typed


def check(wanted, seen):
    """Line by line; ranks speak in any order, and Spark's bar may have gone, or come anew."""
    print("\n".join(seen))
    assert seen[0] == wanted[0]
    bar = re.compile(r"(\[Stage \d+:[=> ]+\(\d+ \+ \d+\) / \d+\])?")
    said = [line for line in seen[1:] if bar.fullmatch(line) is None]
    assert len(seen) - len(said) <= 3
    hello = sum(line.startswith("Hello") for line in wanted)
    assert sorted(said[:hello]) == sorted(wanted[2:2 + hello])
    assert said[hello:] == wanted[2 + hello:]


def test_the_toy_in_a_local_shell():
    pytest.importorskip("torch")
    shell = Shell([PYSPARK, "--master", "local[4]"], os.environ)
    try:
        wanted, seen = picture_typed_into(shell)
    finally:
        shell.close()
    small = [line for line in wanted
             if not (line.startswith("Hello") and int(re.search(r"rank = (\d+)", line)[1]) >= 4)]
    check([line.replace("16", "4").replace(", 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]", "]")
           for line in small], seen)


def test_the_toy_in_a_shell_on_four_hosts(cluster):  # noqa: F811
    pytest.importorskip("torch")
    cluster.wait_for_workers()
    shell = Shell(cluster.inside(0, PYSPARK, "--master", f"spark://spark0:{hosts.MASTER_PORT}",
                                 "--conf", "spark.driver.host=spark0"), cluster.environment(0))
    try:
        wanted, seen = picture_typed_into(shell)
    finally:
        shell.close()
    wanted[0] = wanted[0].replace("processes...", "processes on 4 hosts...")
    if seen[0].startswith("Waiting for executors: "):  # of a machine that is busy
        seen.pop(0)
    check(wanted, seen)
