# SPDX-License-Identifier: Apache-2.0
"""Which hosts an elastic job may use.

A HostDiscovery goes where horovodrun takes a script:

    horovod.run(train, num_proc=2, min_num_proc=1, host_discovery_script=MyDiscovery())

It is asked in this process, once a second; the launcher reads the last answer from a file.
"""
import contextlib
import logging
import os
import pathlib
import shlex
import subprocess
import tempfile
import threading

PERIOD_S = 1.0
_SCRIPT_TIMEOUT_S = 60


class HostDiscovery:
    """Base class of what programs write themselves."""

    def find_available_hosts_and_slots(self):
        """{host name: number of slots}"""
        raise NotImplementedError(f"{type(self).__name__} must say which hosts there are")


class FixedHosts(HostDiscovery):
    """The hosts it was given last."""

    def __init__(self, host_slots):
        super().__init__()
        self._host_slots = host_slots

    def find_available_hosts_and_slots(self):
        return self._host_slots

    def set(self, host_slots):
        self._host_slots = host_slots


class HostDiscoveryScript(HostDiscovery):
    """A program that prints one host, or host:slots, per line."""

    def __init__(self, discovery_script, slots):
        super().__init__()
        self._script = discovery_script
        self._default_slots = slots

    def find_available_hosts_and_slots(self):
        done = subprocess.run(self._script, shell=True, capture_output=True, text=True,
                              timeout=_SCRIPT_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the discovery script {self._script!r} ended with exit code "
                               f"{done.returncode}: {done.stderr.strip()}")
        found = {}
        for line in done.stdout.split():
            name, colon, slots = line.rpartition(":")
            found[name if colon else line] = int(slots) if colon else self._default_slots
        return found


class _Publisher:
    """Keeps a file with the answers of a discovery, and a script that prints it."""

    def __init__(self, discovery, directory):
        self._discovery = discovery
        self._hosts = pathlib.Path(directory, "hosts")
        self.script = str(pathlib.Path(directory, "discover"))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="horovod-discovery", daemon=True)
        self._publish()
        program = f"#!/bin/sh\nexec cat {shlex.quote(str(self._hosts))}\n"
        pathlib.Path(self.script).write_text(program, encoding="utf-8")
        os.chmod(self.script, 0o700)
        self._thread.start()

    def _publish(self):
        hosts = self._discovery.find_available_hosts_and_slots()
        lines = [f"{name}:{int(slots)}\n" for name, slots in hosts.items() if slots > 0]
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(lines), encoding="utf-8")
        new.replace(self._hosts)  # a reader sees the one or the other

    def _serve(self):
        while not self._over.wait(PERIOD_S):
            try:
                self._publish()
            except Exception as error:  # whatever a user's class raises: the last answer stands
                logging.getLogger("horovod").warning(
                    "%s does not say which hosts there are: %s: %s; the job goes on with those "
                    "known", type(self._discovery).__name__, type(error).__name__, error)

    def stop(self):
        self._over.set()
        self._thread.join(_SCRIPT_TIMEOUT_S)


@contextlib.contextmanager
def script_of(discovery):
    """Path of a script for horovodrun: a path as it is, a HostDiscovery behind one of ours."""
    if discovery is None or isinstance(discovery, (str, os.PathLike)):
        yield discovery
        return
    with tempfile.TemporaryDirectory(prefix="horovod-discovery-") as directory:
        publisher = _Publisher(discovery, directory)
        try:
            yield publisher.script
        finally:
            publisher.stop()
