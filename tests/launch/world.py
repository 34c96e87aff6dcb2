# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces with a bridge between them, an sshd in each.

Every host has its own name (which its own resolver says is 127.0.1.1, as Debian has it), its own
interface name and its own address; the launcher sits in a namespace of its own and knows the others
by names that only its ssh configuration has. Needs root. Everything made is removed by close(),
also when a test fails half way.
"""
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

PORT = 2222


def sh(*words):
    return subprocess.run([str(word) for word in words], check=True, timeout=30,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout


class World:
    def __init__(self, hosts):
        """hosts: name -> (interface, shell text run before its sshd)."""
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="hvd-world-"))
        self.tag = f"hvd{os.getpid() % 100000}"
        self.hosts = hosts
        self.undo = contextlib.ExitStack()
        self.undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def space(self, host):
        return f"{self.tag}-{host}"

    def inside(self, host):
        """Words to put before a command to run it on that host."""
        return ["ip", "netns", "exec", self.space(host)]

    def config(self, name="config"):
        return self.directory / name

    def set_link(self, host, state):
        sh(*self.inside(host), "ip", "link", "set", self.hosts[host][0], state)

    def processes(self, host):
        """Ids of the processes there, but for its sshd."""
        ids = sh("ip", "netns", "pids", self.space(host)).split()
        return [int(pid) for pid in ids if int(pid) != self.servers.get(host)]

    def close(self):
        self.undo.close()

    # --- Making it ---

    def _make(self):
        self.servers = {}
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("user", "stranger", "server"):
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.directory / key)
        shutil.copy(self.directory / "user.pub", self.directory / "authorized")
        self._add_space("launcher")
        sh(*self.inside("launcher"), "ip", "link", "add", "br0", "type", "bridge")
        sh(*self.inside("launcher"), "ip", "address", "add", "10.93.0.1/24", "dev", "br0")
        sh(*self.inside("launcher"), "ip", "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts, 2):
            self._add_host(host, f"10.93.0.{number}")
        self._write_configs()
        for host in self.hosts:
            self._start_sshd(host)

    def _add_space(self, host):
        sh("ip", "netns", "add", self.space(host))
        self.undo.callback(sh, "ip", "netns", "delete", self.space(host))
        sh(*self.inside(host), "ip", "link", "set", "lo", "up")

    def _add_host(self, host, address):
        interface, _ = self.hosts[host]
        self._add_space(host)
        names = pathlib.Path("/etc/netns") / self.space(host)
        names.mkdir(parents=True)
        self.undo.callback(shutil.rmtree, names, ignore_errors=True)
        (names / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
        sh("ip", "link", "add", f"v-{host}", "netns", self.space("launcher"), "type", "veth",
           "peer", "name", interface, "netns", self.space(host))
        sh(*self.inside("launcher"), "ip", "link", "set", f"v-{host}", "master", "br0", "up")
        sh(*self.inside(host), "ip", "address", "add", f"{address}/24", "dev", interface)
        sh(*self.inside(host), "ip", "link", "set", interface, "up")

    def _write_configs(self):
        key = (self.directory / "server.pub").read_text().split()[:2]
        lines, known = [], []
        for number, host in enumerate(self.hosts, 2):
            lines.append(f"Host {host}\n    HostName 10.93.0.{number}\n")
            known.append(f"[10.93.0.{number}]:{PORT} {' '.join(key)}\n")
        lines.append("Host nobody\n    HostName 10.93.0.250\n")
        (self.directory / "known").write_text("".join(known))
        (self.directory / "empty").write_text("")
        for name, identity, hosts_file in [("config", "user", "known"),
                                           ("other-key", "stranger", "known"),
                                           ("unknown-host", "user", "empty")]:
            (self.directory / name).write_text(
                "".join(lines) + f"Host *\n    Port {PORT}\n    IdentitiesOnly yes\n"
                f"    IdentityFile {self.directory / identity}\n"
                f"    UserKnownHostsFile {self.directory / hosts_file}\n"
                "    GlobalKnownHostsFile /dev/null\n    StrictHostKeyChecking yes\n")

    def _start_sshd(self, host):
        config = self.directory / f"sshd-{host}"
        config.write_text(
            f"Port {PORT}\nHostKey {self.directory / 'server'}\nPidFile none\nUsePAM no\n"
            "StrictModes no\nPermitRootLogin yes\n"
            f"AuthorizedKeysFile {self.directory / 'authorized'}\n"
            "PasswordAuthentication no\nMaxStartups 100\n")
        server = subprocess.Popen(
            [*self.inside(host), "unshare", "--uts", "--mount", "sh", "-c",
             f"hostname {host}; {self.hosts[host][1]} exec /usr/sbin/sshd -D -e -f {config}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.servers[host] = server.pid
        self.undo.callback(self._end, server, host)
        ssh = ["ssh", "-F", self.config(), "-o", "ConnectTimeout=2", host, "true"]
        for _ in range(100):
            done = subprocess.run([*self.inside("launcher"), *map(str, ssh)], check=False,
                                  timeout=30, stdin=subprocess.DEVNULL, capture_output=True)
            if done.returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError(f"the sshd of {host} does not answer: {done.stderr.decode()}")

    def _end(self, server, host):
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.kill()
        server.wait()
