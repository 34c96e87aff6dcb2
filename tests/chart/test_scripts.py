# SPDX-License-Identifier: Apache-2.0
"""The chart's scripts at work, as rendered: real sshd in network namespaces that stand for the
pods, a small server that stands for the Kubernetes API. Needs root, for the namespaces."""
import base64
import http.server
import json
import os
import re
import ssl
import subprocess
import tempfile
import threading
import time
import unittest
from pathlib import Path

from cases import KEYS
from test_chart import objects, render

FULL = "mnist-horovod"


def sh(*argv, **kw):
    return subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=60, **kw)


def must(*argv):
    done = sh(*argv)
    if done.returncode != 0:
        raise RuntimeError("%s: %s" % (argv, done.stderr))


def lay_out(root, found, role, full=FULL):
    """Puts what a pod of this role finds in its places into folders of root."""
    places = (("/horovod/generated", "generated"), ("/etc/secret-volume", "secret"),
              ("/horovod/secret", "secret"), ("/horovod/dashboard", "dashboard"),
              ("/var/run/secrets/kubernetes.io/serviceaccount", "account"))
    for folder in ("generated", "secret", "dashboard", "home"):
        (root / folder).mkdir(exist_ok=True)
    for key, text in found["ConfigMap", full]["data"].items():
        for place, folder in places:
            text = text.replace(place, str(root / folder))
        path = root / "generated" / re.sub(r"^%s\." % role, "", key)
        path.write_text(text)
        path.chmod(0o555)
    names = {"host-key": "id_rsa", "host-key-pub": "authorized_keys", "secret": "secret"}
    for key, text in found["Secret", full]["data"].items():
        path = root / "secret" / names[key]
        path.touch(mode=0o600)
        path.write_bytes(base64.b64decode(text))
    page = found.get(("Secret", full + "-dashboard"), {"data": {}})
    for key, text in page["data"].items():
        path = root / "dashboard" / key
        path.touch(mode=0o600)
        path.write_bytes(base64.b64decode(text))


class Pod:
    """A network namespace with the files a pod of the release finds, and its own /root/.ssh."""

    def __init__(self, test, number, address, hosts, found, full):
        self.netns = "hc%dn%d" % (os.getpid(), number)
        test.addCleanup(self.remove)
        self.name = "%s-%s" % (full, "master" if number == 0 else number - 1)
        self.root = Path(tempfile.mkdtemp(prefix="pod.", dir=test.folder.name))
        self.role = "worker" if number else "master"
        lay_out(self.root, found, self.role, full)
        pod = found["StatefulSet" if number else "Job", full]["spec"]["template"]["spec"]
        self.env = ["%s=%s" % (e["name"], e.get("value", self.name))  # or the name of the pod
                    for e in pod["containers"][0]["env"]]
        etc = Path("/etc/netns") / self.netns
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(hosts)
        must("ip", "netns", "add", self.netns)
        must("ip", "link", "add", "v" + self.netns, "type", "veth", "peer", "name", "eth0",
             "netns", self.netns)
        must("ip", "link", "set", "v" + self.netns, "master", Scripts.bridge, "up")
        must("ip", "-n", self.netns, "addr", "add", address + "/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            must("ip", "-n", self.netns, "link", "set", device, "up")

    def command(self, *argv):
        script = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.netns, "unshare", "--uts", "env",
                "HOME=%s" % (self.root / "home"), *self.env, "sh", "-c", script, self.name, *argv]

    def main(self, *args):
        """What its container runs."""
        job = ["--job", FULL] if self.role == "master" else []
        return self.command(str(self.root / "generated" / "run.sh"), *job, *args)

    def hostfile(self):
        return (self.root / "generated" / "hostfile").read_text()

    def remove(self):
        # By itself the link goes with the namespace, which may outlive its name for a while.
        sh("ip", "link", "del", "v" + self.netns)
        sh("ip", "netns", "del", self.netns)
        sh("rm", "-r", Path("/etc/netns") / self.netns)


@unittest.skipUnless(os.geteuid() == 0, "network namespaces need root")
class Scripts(unittest.TestCase):
    bridge = "hc%d" % os.getpid()

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        must("ip", "link", "add", self.bridge, "type", "bridge")
        self.addCleanup(sh, "ip", "link", "del", self.bridge)
        must("ip", "link", "set", self.bridge, "up")
        self.servers = []

    def pods(self, values):
        full = values.get("fullnameOverride", FULL)
        found = objects(render(values))
        names = [full + "-master"] + ["%s-%d.%s" % (full, i, full) for i in range(2)]
        addresses = ["10.97.6.%d" % (i + 1) for i in range(3)]
        hosts = "127.0.0.1 localhost\n" + "".join(
            "%s %s %s\n" % (a, n, n.split(".")[0]) for a, n in zip(addresses, names))
        hosts += "%s %s-launcher\n" % (addresses[0], full)
        return [Pod(self, i, address, hosts, found, full) for i, address in enumerate(addresses)]

    def start(self, pod):
        server = subprocess.Popen(pod.main(),
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.servers.append(server)
        self.addCleanup(self.stop, server)
        return server

    def stop(self, server):
        server.terminate()
        self.assertIsNotNone(server.wait(10))

    def values(self, **master):
        key = Path(self.folder.name) / "key"
        must("ssh-keygen", "-q", "-N", "", "-f", key)
        text = key.read_text()
        return {"ssh": {"useSecrets": True, "port": 2222, "hostKey": text.rstrip("\n"),
                        "hostKeyPub": key.with_suffix(".pub").read_text().rstrip("\n")},
                "worker": {"number": 2, "release": False}, "master": master}

    def test_workers_are_waited_for_and_reached(self):
        for kind, values in (("a key of the user", self.values(startTimeout=30)),
                             ("a key made by Helm", {"mode": "openmpi", "ssh": {"port": 2222},
                                                     "worker": {"number": 2, "release": False}})):
            with self.subTest(kind):
                master, *workers = self.pods(values)
                run = subprocess.Popen(
                    master.main(
                        "for h in $(sed 's/ .*//' $HOROVODRUN_HOSTFILE | grep -v master); do",
                        "$HOROVODRUN_SSH_COMMAND $h 'echo at $SSH_CONNECTION' || exit 5; done;",
                        "exit 7"),
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                time.sleep(1)  # workers may come later than the master
                for worker in workers:
                    self.start(worker)
                out, err = run.communicate(timeout=60)
                self.assertEqual(run.returncode, 7, err)
                self.assertIn("10.97.6.2 2222", out)
                self.assertIn("10.97.6.3 2222", out)
                for server in self.servers:
                    self.stop(server)
                for pod in (master, *workers):
                    pod.remove()

    NATIVE = {"worker": {"number": 2, "release": False}, "master": {"startTimeout": 20}}

    def test_native_needs_no_ssh(self):
        master, *workers = self.pods(self.NATIVE)
        run = subprocess.Popen(
            master.main("horovodrun -np 3 sh -c",
                        "'echo $HOROVOD_RANK of $HOROVOD_SIZE; exit $HOROVOD_RANK'"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(1)  # workers may come later than the master
        for worker in workers:
            self.start(worker)
        out, err = run.communicate(timeout=60)
        self.assertIn(run.returncode, (1, 2), err)
        for rank in range(3):
            self.assertIn("[%d]<stdout>:%d of 3" % (rank, rank), out)

    def test_ranks_know_every_setting_that_the_chart_makes(self):
        master, *workers = self.pods(self.NATIVE)
        for worker in workers:
            self.start(worker)
        program = Path(sh("which", "horovodrun").stdout.strip()).with_name("examples") / "allreduce"
        done = sh(*master.main("horovodrun -np 3 %s" % program))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(re.findall(".*setting.*", done.stdout + done.stderr), [])

    def test_its_page_is_there_for_who_has_the_token(self):
        master, *workers = self.pods(dict(self.NATIVE, dashboard={
            "enabled": True, "expose": True, "port": 8090}))
        for worker in workers:
            self.start(worker)
        run = subprocess.Popen(master.main("horovodrun -np 3 sleep 60"),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(self.stop, run)
        page = master.root / "dashboard"
        name = "%s-dashboard.ml.svc" % FULL
        as_service = ["--cacert", page / "ca.crt", "--resolve", name + ":8090:10.97.6.1",
                      "https://%s:8090/metrics" % name]
        proved = ["-H", "Authorization: Bearer " + (page / "token").read_text()]

        def asked(*words):
            """The metrics, or the status of the answer; by a worker."""
            return sh(*workers[0].command("curl", "-sS", "-f", *words)).stderr \
                or sh(*workers[0].command("curl", "-s", *words)).stdout
        deadline = time.monotonic() + 40
        while "hvd_job_ranks 3" not in asked(*proved, *as_service):
            self.assertLess(time.monotonic(), deadline, asked(*proved, *as_service))
            time.sleep(0.5)
        self.assertIn("hvd_job_ranks 3",  # as Prometheus calls a pod
                      asked(*proved, "-k", "https://10.97.6.1:8090/metrics"))
        self.assertIn("401", asked(*as_service))

    def test_native_names_a_missing_worker(self):
        values = dict(self.NATIVE, master={"startTimeout": 4})
        master, first, _ = self.pods(values)
        self.start(first)
        done = sh(*master.main("horovodrun true"))
        self.assertEqual(done.returncode, 75, done.stderr)
        self.assertIn("%s-1.%s" % (FULL, FULL), done.stderr)
        self.assertNotIn("%s-0.%s" % (FULL, FULL), done.stderr)

    def test_agents_serve_one_job_after_another_without_an_open_port(self):
        master, *workers = self.pods(self.NATIVE)
        for worker in workers:
            self.start(worker)
        hello = "horovodrun -np 3 sh -c 'echo $HOROVOD_RANK on $(hostname)'"
        for _ in range(2):
            done = sh(*master.main("%s && %s" % (hello, hello)))
            self.assertEqual(done.returncode, 0, done.stderr)
            for rank, pod in enumerate((master, *workers)):
                line = "[%d]<stdout>:%d on %s\n" % (rank, rank, pod.name)
                self.assertEqual(done.stdout.count(line), 2, done.stdout)
        for worker in workers:
            listening = sh("ip", "netns", "exec", worker.netns, "ss", "-Hltn")
            self.assertEqual((listening.returncode, listening.stdout), (0, ""))

    def test_a_master_with_the_name_of_its_node(self):
        master, *workers = self.pods(self.NATIVE)
        for worker in workers:
            self.start(worker)
        master.name = "node7"
        done = sh(*master.main("horovodrun -np 3 sh -c 'echo $HOROVOD_RANK on $(hostname)'"))
        self.assertEqual(done.returncode, 0, done.stderr)
        for rank, name in enumerate(("node7", FULL + "-0", FULL + "-1")):
            self.assertIn("[%d]<stdout>:%d on %s\n" % (rank, rank, name), done.stdout)

    def test_ready_workers_are_discovered(self):
        for values in (self.values(), {"mode": "intelmpi", "ssh": {"port": 2222},
                                       "worker": {"number": 2, "slots": 3},
                                       "master": {"runsRanks": False}}):
            master, first, second = pods = self.pods(values)
            slots = values["worker"].get("slots", 1)
            expected = [] if slots == 3 else [FULL + "-master:1"]
            self.assertEqual(self.discover(master), expected)
            for i, worker in enumerate((first, second)):
                server = self.start(worker)
                expected.append("%s-%d.%s:%d" % (FULL, i, FULL, slots))
                deadline = time.monotonic() + 30
                while self.discover(master) != expected and time.monotonic() < deadline:
                    time.sleep(0.2)
                self.assertEqual(self.discover(master), expected)
            self.stop(server)  # gone, no longer ready
            self.assertEqual(self.discover(master), expected[:-1])
            self.stop(self.servers[-2])
            for pod in pods:
                pod.remove()

    def test_workers_that_dial_are_discovered_by_their_names(self):
        master, *_ = self.pods(self.NATIVE)
        expected = [FULL + "-master:1", "%s-0.%s:1" % (FULL, FULL), "%s-1.%s:1" % (FULL, FULL)]
        self.assertEqual(self.discover(master), expected)
        self.forget_last_worker(master)
        self.assertEqual(self.discover(master), expected[:-1])

    def forget_last_worker(self, pod):
        """As the name server does with workers that are not ready."""
        hosts = Path("/etc/netns") / pod.netns / "hosts"
        hosts.write_text(re.sub(r".* %s-1\..*\n" % FULL, "", hosts.read_text()))

    def test_workers_beyond_the_hostfile_are_discovered(self):
        master, *workers = self.pods(self.NATIVE)
        hostfile = master.root / "generated" / "hostfile"
        hostfile.write_text("".join(hostfile.read_text().splitlines(True)[:2]))
        deadline = time.monotonic() + 30
        while len(self.discover(master)) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        self.assertEqual(self.discover(master)[-1], "%s-1.%s:1" % (FULL, FULL))

    def discover(self, master):
        done = sh(*master.command(str(master.root / "generated" / "discover_hosts.sh")))
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()

    def test_who_has_not_come_is_said_early(self):
        master, *_ = self.pods(self.NATIVE)
        self.forget_last_worker(master)
        watch = subprocess.Popen(
            master.command(str(master.root / "generated" / "discover_hosts.sh"), "--watch", "5"),
            stderr=subprocess.PIPE, text=True)
        said = watch.stderr.readline()
        watch.terminate()
        watch.communicate(timeout=30)
        self.assertIn("waiting for %s-1.%s: see: kubectl -n ml describe pod" % (FULL, FULL), said)

    def test_a_master_that_shares_a_node_with_a_worker(self):
        """As on the network of the nodes where there are too few."""
        values = self.values(startTimeout=30)
        values["worker"]["slots"] = 2
        for mode, merged in (("openmpi", "%s-1.%s slots=3"), ("intelmpi", "%s-1.%s:3")):
            with self.subTest(mode):
                values["mode"] = mode
                master, first, second = pods = self.pods(values)
                first_line = master.hostfile().splitlines()[1]
                hosts = Path("/etc/netns") / master.netns / "hosts"
                hosts.write_text(re.sub(r"\S+ (%s-1\S*) (\S+)" % FULL, r"10.97.6.1 \1 \2",
                                        hosts.read_text()))
                self.start(first)
                # The sshd of the worker at the address of both.
                sshd = subprocess.Popen(
                    ["ip", "netns", "exec", master.netns, *second.main()[4:]],
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                self.addCleanup(self.stop, sshd)
                done = sh(*master.main("cat $HOROVODRUN_HOSTFILE"))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stdout.splitlines(), [merged % (FULL, FULL), first_line])
                self.assertIn("it shares that of %s-1.%s" % (FULL, FULL), done.stderr)
                self.stop(sshd)
                for pod in pods:
                    pod.remove()

    def test_a_master_with_a_node_of_its_own_keeps_the_hostfile(self):
        master, *workers = self.pods(self.values(startTimeout=30))
        for worker in workers:
            self.start(worker)
        before = master.hostfile()
        done = sh(*master.main("cat $HOROVODRUN_HOSTFILE"))
        self.assertEqual((done.returncode, done.stdout), (0, before), done.stderr)

    def test_a_missing_worker_is_named(self):
        self.missing_is_named()

    def test_also_where_every_name_ends_in_master(self):
        self.missing_is_named("a-master")

    def missing_is_named(self, full=FULL):
        values = dict(self.values(startTimeout=3), fullnameOverride=full)
        master, first, _ = self.pods(values)
        self.start(first)
        done = sh(*master.main("echo", "begun"))
        self.assertEqual((done.returncode, done.stdout), (69, ""), done.stderr)
        self.assertIn("%s-1.%s: " % (full, full), done.stderr)
        self.assertNotIn("%s-0.%s: " % (full, full), done.stderr)

    def test_a_stranger_does_not_get_in(self):
        values = self.values(startTimeout=20)
        master, worker, _ = self.pods(values)
        self.start(worker)
        stranger = Path(self.folder.name) / "stranger"
        must("ssh-keygen", "-q", "-N", "", "-f", stranger)
        deadline = time.monotonic() + 20
        while True:
            done = sh(*master.command(
                "ssh", "-F", "none", "-i", str(stranger), "-p", "2222",
                "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
                "-o", "BatchMode=yes", FULL + "-0." + FULL, "true"))
            if "refused" not in done.stderr or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        self.assertIn("Permission denied", done.stderr)

    def test_a_worker_ends_at_once(self):
        _, worker, _ = self.pods(self.values())
        server = self.start(worker)
        time.sleep(1)
        began = time.monotonic()
        self.stop(server)
        self.assertLess(time.monotonic() - began, 5)


def statefulset(generation=2, observed=2, current="a", update="a", updated=2, ready=2):
    """As much of its description as the master reads."""
    return {"metadata": {"generation": generation}, "status": {
        "observedGeneration": observed, "currentRevision": "mnist-" + current,
        "updateRevision": "mnist-" + update, "updatedReplicas": updated, "readyReplicas": ready}}


class Api(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"metadata":{"name":"mnist-horovod"%s}}' % self.server.more
        if "/statefulsets/" in self.path:
            sets = self.server.sets
            indent = 2 if "curl" in self.headers["User-Agent"] else None
            body = json.dumps(sets.pop(0) if len(sets) > 1 else sets[0], indent=indent).encode()
        else:
            self.server.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PATCH(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        pass


class Release(unittest.TestCase):
    """The master asks the API for the workers, and gives them back through it."""
    sooner = False  # workers are late after one second

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        root = Path(self.folder.name)
        account = root / "account"
        account.mkdir()
        must("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-nodes", "-keyout", root / "key", "-out", account / "ca.crt", "-days", "1",
             "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1")
        (account / "token").write_text("the-token")
        self.server = http.server.HTTPServer(("127.0.0.1", 0), Api)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(account / "ca.crt", root / "key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.server.seen, self.server.asked, self.server.more = [], [], b""
        self.server.sets = [statefulset(updated=9, ready=9)]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)

    def run_master(self, values, *args, path=None):
        argv, env = self.master(values, path)
        return sh(*argv, *args, env=env)

    def master(self, values, path=None):
        root = Path(self.folder.name)
        lay_out(root, objects(render(values)), "master")
        script = root / "generated" / "run.sh"
        if self.sooner:
            replaced = script.read_text().replace("+ 10))", "+ 1))")
            script.unlink()
            script.write_text(replaced)
        env = dict(os.environ, KUBERNETES_SERVICE_HOST="127.0.0.1",
                   KUBERNETES_SERVICE_PORT=str(self.server.server_port), HOME=str(root / "home"))
        if path:
            env["PATH"] = path
        return ["/bin/sh", str(script), "--job", FULL], env

    def expect(self, n):
        path = "/apis/apps/v1/namespaces/ml/statefulsets/%s/scale" % FULL
        self.assertEqual(self.server.seen,
                         [(path, "Bearer the-token", b'{"spec":{"replicas":0}}')] * n)

    def test_after_success(self):
        done = self.run_master({}, "echo", "hello", "from", "$HOROVODRUN_AWAIT_AGENTS")
        self.assertEqual((done.returncode, done.stdout), (0, "hello from 23023\n"), done.stderr)
        self.expect(1)

    def told_to_end(self):
        argv, env = self.master({})
        run = subprocess.Popen(argv + ["echo begun; exec sleep 60"], env=env,
                               stdout=subprocess.PIPE, text=True)
        self.assertEqual(run.stdout.readline(), "begun\n")
        run.terminate()
        run.communicate(timeout=60)
        self.assertNotEqual(run.returncode, 0)
        self.assertEqual(self.server.asked, ["/apis/batch/v1/namespaces/ml/jobs/" + FULL])

    def test_after_its_deadline(self):
        self.told_to_end()
        self.expect(1)

    def test_not_if_an_upgrade_ends_the_job(self):
        self.server.more = b',"deletionTimestamp":"2030-01-01T00:00:00Z"'
        self.told_to_end()
        self.expect(0)

    def test_without_curl(self):
        tools = Path(self.folder.name) / "bin"
        tools.mkdir()
        for name in ("sh", "sed", "awk", "cat", "date", "python3", "sleep"):
            (tools / name).symlink_to(sh("which", name).stdout.strip())
        done = self.run_master({}, "true", path=str(tools))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.expect(1)

    def test_after_the_last_failure_only(self):
        twice_more = {"master": {"backoffLimit": 2}}
        for status in (b"", b',"status":{"failed":1}', b',"status": {\n"failed": 1\n}'):
            self.server.more = status
            self.assertEqual(self.run_master(twice_more, "exit 3").returncode, 3)
            self.expect(0)
        self.server.more = b',"status":{"active":1,"failed":2,"ready":1}'
        self.assertEqual(self.run_master(twice_more, "exit 3").returncode, 3)
        self.expect(1)
        self.server.more = b',"status":{"failed":0,"conditions":[{"type":"FailureTarget"}]}'
        self.assertEqual(self.run_master(twice_more, "exit 3").returncode, 3)
        self.expect(2)
        self.server.more = b""
        self.assertEqual(self.run_master({}, "exit 3").returncode, 3)
        self.expect(3)

    def over_ssh(self, **master):
        return {"mode": "openmpi", "worker": {"number": 2}, "master": master}

    def test_when_workers_do_not_come(self):
        done = self.run_master(self.over_ssh(startTimeout=1), "echo begun")
        self.assertEqual((done.returncode, done.stdout), (69, ""), done.stderr)
        self.assertIn("after 1 s these workers do not answer", done.stderr)
        self.expect(1)

    def test_when_workers_do_not_come_to_the_last_try(self):
        once_more = self.over_ssh(startTimeout=1, backoffLimit=1)
        self.assertEqual(self.run_master(once_more, "true").returncode, 69)
        self.expect(0)
        self.server.more = b',"status":{"failed":1}'
        self.assertEqual(self.run_master(once_more, "true").returncode, 69)
        self.expect(1)

    def test_when_the_key_cannot_be_read(self):
        done = self.run_master({"ssh": KEYS}, "echo begun")
        self.assertEqual((done.returncode, done.stdout), (78, ""), done.stderr)
        self.assertIn("ssh.hostKey is not a private key", done.stderr)
        self.expect(1)

    def test_when_the_deadline_passes_before_workers_have_come(self):
        argv, env = self.master(self.over_ssh(startTimeout=60))
        with subprocess.Popen(argv + ["true"], env=env, start_new_session=True) as run:
            config = Path(env["HOME"]) / ".ssh" / "config"
            self.until(config.exists, "it never waited")
            time.sleep(1)
            run.terminate()
            self.assertEqual(run.wait(30), 143)
        self.expect(1)
        self.until(lambda: not sh("ps", "-o", "pid=", "-s", run.pid).stdout, "something is left")

    def until(self, happened, otherwise):
        deadline = time.monotonic() + 30
        while not happened():
            self.assertLess(time.monotonic(), deadline, otherwise)
            time.sleep(0.1)

    TWO = {"worker": {"number": 2}, "master": {"startTimeout": 60}}

    def begins_with(self, *sets, values=TWO, **kw):
        """The command begins when the StatefulSet is as in the last of these, not before."""
        self.server.sets = list(sets)
        done = self.run_master(values, "echo begun", **kw)
        self.assertEqual((done.returncode, done.stdout), (0, "begun\n"), done.stderr)
        self.assertEqual(self.server.sets, [sets[-1]])

    def test_begins_when_workers_are_ready(self):
        self.begins_with(statefulset(updated=0, ready=0), statefulset(ready=1), statefulset())

    def test_begins_when_the_last_release_is_gone(self):
        self.begins_with(statefulset(observed=1),  # not looked at yet
                         statefulset(update="b", updated=0), statefulset(update="b", updated=1),
                         statefulset(update="b"), statefulset(current="b", update="b"))

    def test_begins_when_a_worker_is_late(self):
        self.begins_with(statefulset(ready=1), values=dict(self.TWO, master={"startTimeout": 3}))
        self.sooner = True
        self.begins_with(statefulset(ready=1))
        self.begins_with(statefulset(update="b", ready=1))

    def test_does_not_begin_late_with_workers_of_the_last_release(self):
        self.sooner = True
        self.begins_with(*[statefulset(update="b", updated=1)] * 12, statefulset())

    def test_not_if_workers_shall_stay(self):
        self.assertEqual(self.run_master({"worker": {"release": False}}, "true").returncode, 0)
        self.expect(0)

    def test_a_dead_server_does_not_fail_the_job(self):
        self.server.shutdown()
        self.server.server_close()
        done = self.run_master({}, "true")
        self.assertEqual(done.returncode, 0)
        self.assertIn("were not released", done.stderr)


if __name__ == "__main__":
    unittest.main()
