# SPDX-License-Identifier: Apache-2.0
"""A Spark standalone cluster on hosts of its own: network namespaces with names and addresses.

Host 0 has the master and the driver, hosts 1 to n a worker each. Everything made here is removed
again by close(): processes by their ids, namespaces by their names. Needs root.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import time

import pyspark

PREFIX = f"hvds{os.getpid() % 10000}"
NETWORK = "10.77.%d" % (os.getpid() % 200 + 20)
MASTER_PORT = 7077
WEB_PORT = 18080


def sh(*words):
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


class Cluster:
    def __init__(self, n_workers, cores):
        self.n_workers = n_workers
        self.folder = tempfile.mkdtemp(prefix="hvd-spark-")
        self.processes = []
        self.names = [f"{PREFIX}n{i}" for i in range(n_workers + 1)]
        self.home = os.path.dirname(pyspark.__file__)
        try:
            for i, name in enumerate(self.names):
                self._make_host(i, name)
            self._start(0, "org.apache.spark.deploy.master.Master", "-h", "spark0", "-p",
                        str(MASTER_PORT), "--webui-port", str(WEB_PORT))
            for i in range(1, n_workers + 1):
                self._start(i, "org.apache.spark.deploy.worker.Worker", "-h", f"spark{i}", "-c",
                            str(cores), "-m", "1g", "-d", f"{self.folder}/work{i}", "--webui-port",
                            str(WEB_PORT), f"spark://spark0:{MASTER_PORT}")
        except BaseException:
            self.close()
            raise

    def _make_host(self, i, name):
        os.makedirs(f"/etc/netns/{name}", exist_ok=True)
        with open(f"/etc/netns/{name}/hosts", "w") as file:
            file.write("127.0.0.1 localhost\n")
            for j in range(self.n_workers + 1):
                file.write(f"{NETWORK}.{10 + j} spark{j}\n")
        sh("ip", "netns", "add", name)
        sh("ip", "-n", name, "link", "set", "lo", "up")
        if i == 0:
            sh("ip", "-n", name, "link", "add", "br0", "type", "bridge")
            sh("ip", "-n", name, "addr", "add", f"{NETWORK}.10/24", "dev", "br0")
            sh("ip", "-n", name, "link", "set", "br0", "up")
            return
        first = self.names[0]
        sh("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"v{i}",
           "netns", first)
        sh("ip", "-n", first, "link", "set", f"v{i}", "master", "br0", "up")
        sh("ip", "-n", name, "addr", "add", f"{NETWORK}.{10 + i}/24", "dev", "eth0")
        sh("ip", "-n", name, "link", "set", "eth0", "up")

    def inside(self, i, *words):
        """The command that runs these words on host i."""
        return ["ip", "netns", "exec", self.names[i], "unshare", "-u", "sh", "-c",
                f'hostname spark{i}; exec "$@"', "sh", *words]

    def environment(self, i):
        return {**os.environ, "SPARK_HOME": self.home, "SPARK_LOCAL_IP": f"{NETWORK}.{10 + i}",
                "PYSPARK_PYTHON": sys.executable, "SPARK_LOG_DIR": self.folder}

    def _start(self, i, *words):
        log = open(f"{self.folder}/log{i}", "ab")
        self.processes.append(subprocess.Popen(
            self.inside(i, f"{self.home}/bin/spark-class", *words), env=self.environment(i),
            stdout=log, stderr=log))

    def run_driver(self, script, *args, timeout=1800):
        """Runs a Python driver on host 0; its standard output."""
        return subprocess.run(self.inside(0, sys.executable, script, *args), check=True,
                              env=self.environment(0), stdout=subprocess.PIPE, text=True,
                              timeout=timeout).stdout

    def wait_for_workers(self, seconds=600):
        deadline = time.monotonic() + seconds
        page = f"http://{NETWORK}.10:{WEB_PORT}/json/"
        ask = f"import urllib.request; print(urllib.request.urlopen('{page}').read().decode())"
        while time.monotonic() < deadline:
            seen = subprocess.run(self.inside(0, sys.executable, "-c", ask), text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
            if seen.count('"ALIVE"') >= self.n_workers + 1:
                return
            time.sleep(1)
        raise RuntimeError(f"the workers did not come up; logs in {self.folder}")

    def close(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for name in self.names:
            for pid in subprocess.run(["ip", "netns", "pids", name], stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL, text=True).stdout.split():
                try:
                    os.kill(int(pid), 9)
                except ProcessLookupError:
                    pass
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)
