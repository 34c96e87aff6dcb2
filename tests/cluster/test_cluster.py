# SPDX-License-Identifier: Apache-2.0
"""The chart on a real cluster, with the images of deploy/docker: see run.sh beside this file.

Needs kubectl and helm on PATH, a cluster of three nodes, and on its nodes the images that run.sh
builds. HELM names another helm. Times are printed; HVD_QUIET=1 also holds them to their limits,
which makes sense on a machine that does nothing else.
"""
import base64
import json
import os
import pathlib
import re
import secrets
import subprocess
import tempfile
import time
import unittest

import every_value

CHART = pathlib.Path(__file__).resolve().parents[2] / "charts" / "horovod"
HELM = os.environ.get("HELM", "helm")
PATIENCE_S = 1800  # for anything that is sure to come
JOB = "mnist-horovod"
CAP_IPC_LOCK = 14

# As the first users of the chart are told to type it, but for `~`.
SEED = r"""
export SSH_KEY_DIR=`mktemp -d`
cd $SSH_KEY_DIR
yes | ssh-keygen -N "" -f id_rsa
cat << EOF > %(values)s
---
%(network)sssh:
  useSecrets: true
%(port)s  hostKey: |-
$(cat $SSH_KEY_DIR/id_rsa | sed 's/^/    /g')

  hostKeyPub: |-
$(cat $SSH_KEY_DIR/id_rsa.pub | sed 's/^/    /g')

worker:
  number: 2
  image:
    repository: uber/horovod
    tag: 0.12.1-tf1.8.0-py3.5
master:
  image:
    repository: uber/horovod
    tag: 0.12.1-tf1.8.0-py3.5
  args:
    - "mpirun -np 3 --hostfile /horovod/generated/hostfile --mca orte_keep_fqdn_hostnames t """ \
    r"""--allow-run-as-root --display-map --tag-output --timestamp-output sh -c """ \
    r"""'/opt/conda/envs/tf_env/bin/python """ \
    r"""/opt/spark/examples/src/main/python/tensorflow/keras_mnist_advanced_modified.py'"
EOF
rm -r "${SSH_KEY_DIR:?}"
"""


def run(*argv, check=True, timeout=PATIENCE_S, stdin=None):
    done = subprocess.run([str(a) for a in argv], input=stdin, capture_output=True, text=True,
                          timeout=timeout)
    if check and done.returncode != 0:
        raise AssertionError("%s: exit %d\n%s%s" % (" ".join(map(str, argv)), done.returncode,
                                                    done.stdout, done.stderr))
    return done


class Namespace(unittest.TestCase):
    """Each test has a namespace of its own, removed with all that is in it."""
    labels = {}

    def setUp(self):
        name = self.id().rpartition("test_")[2][:30].replace("_", "-").strip("-")
        self.namespace = "hvd-%d-%s" % (os.getpid(), name)
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {
            "name": self.namespace, "labels": self.labels}})
        self.addCleanup(run, "kubectl", "delete", "namespace", self.namespace, "--wait=false")
        self.addCleanup(run, HELM, "uninstall", "-n", self.namespace, "mnist", check=False)

    def create(self, value):
        run("kubectl", "create", "-f", "-", stdin=json.dumps(value))

    def kubectl(self, *argv, **kw):
        return run("kubectl", "-n", self.namespace, *argv, **kw)

    def get(self, *what):
        return json.loads(self.kubectl("get", *what, "-o", "json").stdout)

    def helm(self, verb, values):
        self.began = time.monotonic()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(values, file)
            file.flush()
            return run(HELM, verb, "mnist", CHART, "-n", self.namespace, "--values", file.name)

    def log(self, job=JOB):
        done = self.kubectl("logs", "job/" + job, "--all-containers", check=False)
        return done.stdout + done.stderr

    def until(self, text, job=JOB):
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.log(job):
            self.assertLess(time.monotonic(), deadline, self.log(job))
            time.sleep(0.5)

    def ended(self, job=JOB):
        """Waits for the end of the job. -> Complete or Failed, the log of the master"""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            conditions = self.get("job", job)["status"].get("conditions", [])
            found = [c["type"] for c in conditions if c["status"] == "True"
                     and c["type"] in ("Complete", "Failed")]
            if found:
                self.took_s = time.monotonic() - self.began
                return found[0], self.log(job)
            time.sleep(0.2)
        raise AssertionError("the job did not end\n%s\n%s" % (
            self.log(job), self.kubectl("describe", "pods").stdout[-8000:]))

    def completes(self, job=JOB):
        how, log = self.ended(job)
        self.assertEqual(how, "Complete", log)
        return log

    def fails(self):
        how, log = self.ended()
        self.assertEqual(how, "Failed", log)
        return log

    def fails_at_its_deadline(self):
        self.kubectl("patch", "job", JOB, "-p", '{"spec":{"activeDeadlineSeconds":1}}')
        self.fails()
        self.workers_go()

    def workers(self):
        pods = self.get("pods", "-l", "role=worker")["items"]
        return [pod["metadata"]["name"] for pod in pods]

    def workers_go(self):
        deadline = time.monotonic() + PATIENCE_S
        while self.workers() and time.monotonic() < deadline:
            time.sleep(0.2)
        self.assertEqual(self.workers(), [])

    def hold(self, what, seconds, limit_s):
        print("\n  %s: %.1f s" % (what, seconds), flush=True)
        if os.environ.get("HVD_QUIET"):
            self.assertLess(seconds, limit_s, what)


HELLO = "horovodrun -np 3 sh -c 'echo hello from $HOROVOD_RANK of $HOROVOD_SIZE on $(hostname)'"
FOREVER = "horovodrun -np 3 python3 -c 'import time, horovod.torch as hvd, torch\n" \
          "hvd.init()\n" \
          "print(\"in step\", flush=True)\n" \
          "while True:\n" \
          "    hvd.allreduce(torch.ones(1), name=\"one\")\n" \
          "    time.sleep(0.1)'"

# Trains until the job has had these sizes, one after the other; the state outlives the ranks.
ELASTIC = """horovodrun -np 3 --min-np 2 --blacklist-cooldown-range 1 5 \\
    --host-discovery-script /horovod/generated/discover_hosts.sh python3 -c '
import time, torch, horovod.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(step=0, sizes=[])

@hvd.elastic.run
def train(state):
    if state.sizes[-1:] != [hvd.size()]:
        state.sizes = state.sizes + [hvd.size()]
    if hvd.rank() == 0:
        print("sizes", state.sizes, "at step", state.step, flush=True)
    while state.sizes != %s:
        hvd.allreduce(torch.ones(1), name="one")
        state.step += 1
        if hvd.rank() == 0 and state.step == 20:
            print("twenty steps", flush=True)
        state.commit()
        time.sleep(0.05)

train(state)
'"""


def hello(**values):
    merged = {"worker": {"number": 2}, "master": {"args": [HELLO]}}
    for key, value in values.items():
        merged[key] = dict(merged[key], **value) if key in merged else value
    return merged


class Restricted(Namespace):
    """Under the Pod Security Standard "restricted", which the chart fits by default."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}

    def test_mnist_trains(self):
        said = self.helm("install", {"worker": {"number": 2}})
        self.assertNotIn("would violate", said.stderr)
        log = self.completes()
        losses = [float(line.split("loss ")[1]) for line in log.splitlines() if " loss " in line]
        self.assertGreater(len(losses), 5, log)
        self.assertLess(losses[-1], losses[0] / 2)
        self.assertIn("on 3 ranks", log)
        self.assertIn("test accuracy", log)
        self.assertNotIn("not a known setting", log)
        self.workers_go()
        print("\n  MNIST on 3 ranks: %.1f s, last loss %g" % (self.took_s, losses[-1]))

    def test_hello_is_quick(self):
        self.helm("install", hello())
        log = self.completes()
        for rank in range(3):
            self.assertIn("hello from %d of 3 on" % rank, log)
        pod = self.get("statefulset", JOB)["spec"]["template"]["spec"]["containers"][0]
        self.assertNotIn("ports", pod)  # workers dial
        self.hold("install to finished job", self.took_s, 10)
        self.workers_go()
        self.hold("install to workers gone", time.monotonic() - self.began, 20)

    def test_upgrades(self):
        self.helm("install", hello())
        self.completes()
        self.workers_go()
        self.helm("upgrade", hello(master={"args": ["echo again; " + HELLO]}))
        log = self.completes(JOB + "-r2")
        self.assertIn("again", log)
        self.assertIn("hello from 2 of 3", log)
        self.workers_go()
        # And one that runs, whose workers are replaced one by one.
        self.helm("upgrade", hello(master={"args": [FOREVER]}))
        self.until("in step", JOB + "-r3")
        self.helm("upgrade", hello(worker={"env": {"NEW": "worker"}}, master={
            "args": [HELLO.replace("echo", "echo $NEW")]}))
        log = self.completes(JOB + "-r4")
        for rank in (1, 2):
            self.assertIn("worker hello from %d of 3" % rank, log)
        self.workers_go()
        # And one that runs, with fewer workers.
        self.helm("upgrade", hello(master={"args": [FOREVER]}))
        self.until("in step", JOB + "-r5")
        self.helm("upgrade", hello(worker={"number": 1}, master={
            "args": [HELLO.replace("-np 3", "-np 2")]}))
        self.assertIn("hello from 1 of 2", self.completes(JOB + "-r6"))
        jobs = [job["metadata"]["name"] for job in self.get("jobs")["items"]
                if not job["metadata"].get("deletionTimestamp")]
        self.assertEqual(jobs, [JOB + "-r6"])

    def test_uninstall_leaves_nothing(self):
        self.helm("install", hello(networkPolicy={"enabled": True},
                                   podDisruptionBudget={"enabled": True}))
        self.completes()
        run(HELM, "uninstall", "-n", self.namespace, "mnist", "--wait")
        kinds = "pods,jobs,statefulsets,services,configmaps,secrets,serviceaccounts,roles," \
                "rolebindings,networkpolicies,poddisruptionbudgets"
        deadline = time.monotonic() + PATIENCE_S
        while True:
            left = self.kubectl("get", kinds, "-l", "release=mnist", "-o", "name").stdout
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        self.assertEqual(left, "")

    def test_a_deleted_worker_fails_the_job(self):
        self.helm("install", hello(master={"args": [FOREVER]}))
        self.until("in step")
        self.kubectl("delete", "pod", JOB + "-1", "--wait=false")
        self.began = time.monotonic()
        log = self.fails()
        self.hold("deleted worker to failed job", self.took_s, 30)
        self.assertIn("%s-1.%s" % (JOB, JOB), log)
        self.workers_go()

    def test_mpirun_without_root(self):
        self.helm("install", hello(
            mode="openmpi", ssh={"port": 2222},
            podSecurityContext={"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000,
                                "seccompProfile": {"type": "RuntimeDefault"}},
            containerSecurityContext={"allowPrivilegeEscalation": False,
                                      "capabilities": {"drop": ["ALL"]}},
            master={"args": ["mpirun -np 3 sh -c 'echo user $(id -u) on $(hostname)'"]}))
        log = self.completes()
        for pod in ("master", "0", "1"):
            self.assertIn("user 1000 on %s-%s" % (JOB, pod), log)
        self.workers_go()

    def test_workers_are_kept_for_another_try(self):
        self.helm("install", hello(master={
            "backoffLimit": 1, "args": ["horovodrun -np 3 true && exit 3"]}))
        self.fails()
        codes = [pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
                 for pod in self.get("pods", "-l", "role=master")["items"]]
        self.assertEqual(codes, [3, 3])
        self.workers_go()

    def test_workers_go_when_the_deadline_passes(self):
        self.helm("install", hello(master={"backoffLimit": 1, "args": [FOREVER]}))
        self.until("in step")
        self.fails_at_its_deadline()

    def test_an_elastic_job_outlives_a_worker(self):
        self.helm("install", hello(master={"args": [ELASTIC % [3, 2, 3]]}))
        self.until("twenty steps")
        self.kubectl("delete", "pod", JOB + "-1", "--wait=false")
        log = self.completes()  # with two ranks, then with the worker's successor
        went_on = re.search(r"sizes \[3, 2\] at step (\d+)", log)
        self.assertIsNotNone(went_on, log)
        self.assertGreaterEqual(int(went_on.group(1)), 20)
        self.assertIn("sizes [3, 2, 3]", log)
        self.workers_go()

    def test_an_elastic_job_grows(self):
        self.helm("install", hello(master={"args": [ELASTIC % [3, 4]]}))
        self.until("twenty steps")
        self.kubectl("scale", "statefulset", JOB, "--replicas=3")
        self.assertIn("sizes [3, 4]", self.completes())
        self.workers_go()

    def test_helm_test(self):
        self.helm("install", hello())
        self.completes()
        done = run(HELM, "test", "-n", self.namespace, "mnist")
        self.assertIn("Succeeded", done.stdout)

    def test_ready_workers_are_discovered(self):
        discover = "/horovod/generated/discover_hosts.sh"
        self.helm("install", hello(master={"args": [
            "until [ $(%s | wc -l) = 3 ]; do sleep 0.5; done; %s" % (discover, discover)]}))
        self.assertEqual(self.completes().split(), [
            JOB + "-master:1", "%s-0.%s:1" % (JOB, JOB), "%s-1.%s:1" % (JOB, JOB)])


class OverSsh(Namespace):
    def test_generated_keys(self):
        greet = "'echo $GREETING $(which horovodrun) from $(hostname)'"
        self.helm("install", hello(
            mode="openmpi", worker={"env": {"GREETING": "good day"}},
            master={"args": ["mpirun -np 3 --allow-run-as-root sh -c " + greet]}))
        log = self.completes()
        for i in range(2):
            self.assertIn("good day /opt/horovod/bin/horovodrun from %s-%d" % (JOB, i), log)
        self.hold("install to finished mpirun", self.took_s, 10)
        self.workers_go()

    def test_horovodrun_over_ssh(self):
        self.helm("install", hello(mode="ssh", ssh={"port": 2222}))
        self.assertIn("hello from 2 of 3", self.completes())

    # On the network of three nodes, the fourth worker does not come.
    ONE_TOO_MANY = {"mode": "ssh", "useHostNetwork": True, "ssh": {"port": 32222},
                    "worker": {"number": 4}}

    def test_one_does_not_come(self):
        self.helm("install", hello(master={"startTimeout": 20}, **self.ONE_TOO_MANY))
        log = self.fails()
        self.assertIn("after 20 s these workers do not answer on port 32222", log)
        self.assertNotIn("hello", log)
        self.workers_go()

    def test_one_does_not_come_until_the_deadline(self):
        self.helm("install", hello(**self.ONE_TOO_MANY))
        self.until("horovod: waiting for")
        self.fails_at_its_deadline()

    def test_a_key_that_cannot_be_read(self):
        key = "-----BEGIN OPENSSH PRIVATE KEY-----\n-----END OPENSSH PRIVATE KEY-----"
        self.helm("install", hello(ssh={"useSecrets": True, "hostKey": key,
                                        "hostKeyPub": "ssh-ed25519 AAAA"}))
        log = self.fails()
        self.assertIn("ssh.hostKey is not a private key", log)
        self.workers_go()

    def seed(self, network="", port=""):
        with tempfile.TemporaryDirectory() as folder:
            values = pathlib.Path(folder) / "values.yaml"
            run("bash", "-c", SEED % {"values": values, "network": network, "port": port})
            self.began = time.monotonic()
            run(HELM, "install", "--values", values, "mnist", CHART, "-n", self.namespace)
        log = self.completes()
        self.assertIn("JOB MAP", log)
        for rank in range(3):
            self.assertRegex(log, r"\[1,%d\]<std" % rank)
        self.assertNotIn("not a known setting", log)
        learned = re.search(r"test loss [\d.]+, test accuracy ([\d.]+)", log)
        self.assertIsNotNone(learned, log)
        self.assertGreaterEqual(float(learned.group(1)), 0.95, log)
        print("\n  Keras MNIST by mpirun on 3 ranks: %.1f s, test accuracy %s" % (
            self.took_s, learned.group(1)))
        self.workers_go()

    def test_seed_example(self):
        self.seed()

    def test_seed_example_on_host_network(self):
        self.seed("useHostNetwork: true\n\n", "  port: 32222\n")

    def test_a_node_for_each_worker_and_none_for_the_master(self):
        self.helm("install", hello(
            mode="openmpi", useHostNetwork=True, ssh={"port": 32222},
            worker={"number": 3, "extraEnv": every_value.FIELD},
            master={"extraEnv": every_value.FIELD, "args": [
                "mpirun -np 4 --hostfile /horovod/generated/hostfile --allow-run-as-root sh -c"
                " 'echo rank $OMPI_COMM_WORLD_RANK at $NODE'"]}))
        log = self.completes()
        self.assertIn("no node is left for the master alone: it shares that of", log)
        at = dict(re.findall(r"^rank (\d) at (node\d)$", log, re.M))
        self.assertEqual(len(at), 4, log)
        self.assertEqual(at["0"], at["1"])  # those of the master and of the worker beside it
        self.assertEqual(set(at.values()), {"node1", "node2", "node3"})
        self.workers_go()


class HostNetwork(Namespace):
    def test_three_workers_on_three_nodes(self):
        self.helm("install", hello(useHostNetwork=True, worker={"number": 3}, master={
            "args": [HELLO.replace("-np 3", "-np 4")]}))
        log = self.completes()
        for rank in range(4):
            self.assertIn("hello from %d of 4 on" % rank, log)
        self.workers_go()

    def test_more_workers_than_nodes(self):
        self.helm("install", hello(useHostNetwork=True, worker={"number": 4}, master={
            "args": [HELLO.replace("-np 3", "-np 5")]}))
        log = self.completes()  # no worker listens: two may share a node
        for rank in range(5):
            self.assertIn("hello from %d of 5 on" % rank, log)
        self.workers_go()

    def test_too_few_nodes(self):
        self.helm("install", hello(
            useHostNetwork=True, mode="ssh", ssh={"port": 32222}, worker={"number": 4},
            master={"args": [HELLO.replace("-np 3", "-np 5")], "startTimeout": 30}))
        log = self.fails()
        self.assertRegex(log, r"waiting for %s-\d.%s: .*free ports" % (JOB, JOB))
        self.workers_go()

    def test_a_worker_that_no_node_takes(self):
        self.helm("install", hello(worker={"nodeSelector": {"is": "nowhere"}},
                                   master={"startTimeout": 30}))
        log = self.fails()
        self.assertRegex(log, r"waiting for %s-\d.%s: .*nodes are available" % (JOB, JOB))
        self.workers_go()


class Devices(Namespace):
    """Devices that the nodes only say they have: enough to be counted and asked for."""
    RESOURCES = {"example.com/gpu": "4", "rdma/hca": "4"}

    def setUp(self):
        super().setUp()
        for node in json.loads(run("kubectl", "get", "nodes", "-o", "json").stdout)["items"]:
            name = node["metadata"]["name"]
            self.addCleanup(self.patch, name, dict.fromkeys(self.RESOURCES))
            self.patch(name, self.RESOURCES)

    def patch(self, node, resources):
        run("kubectl", "patch", "node", node, "--subresource=status", "--type=merge", "-p",
            json.dumps({"status": {"capacity": resources, "allocatable": resources}}))

    def test_gpus_are_slots(self):
        self.helm("install", hello(
            worker={"number": 2, "resources": {"limits": {"example.com/gpu": 2}}},
            master={"runsRanks": False, "args": [HELLO.replace("-np 3", "-np 4")]}))
        log = self.completes()
        for rank in range(4):
            self.assertIn("hello from %d of 4 on %s-%d" % (rank, JOB, rank // 2), log)

    def test_pods_with_rdma_may_lock_memory(self):
        self.helm("install", hello(rdma={"resource": "rdma/hca", "count": 1}, master={
            "args": ["horovodrun -np 3 grep CapEff /proc/self/status"]}))
        sets = re.findall(r"CapEff:\s*([0-9a-f]+)", self.completes())
        self.assertEqual([int(one, 16) >> CAP_IPC_LOCK & 1 for one in sets], [1] * 3)


class EveryValue(Devices):
    """Every row of the chart's table, set to something else."""

    def setUp(self):
        super().setUp()
        name = "hvd-test"
        run("kubectl", "delete", "priorityclass", name, "--ignore-not-found")
        self.create({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
                     "metadata": {"name": name}, "value": 7})
        self.addCleanup(run, "kubectl", "delete", "priorityclass", name, "--ignore-not-found")

    def create_secret(self, name, **texts):
        self.create({"apiVersion": "v1", "kind": "Secret", "stringData": texts,
                     "metadata": {"name": name, "namespace": self.namespace}})

    def one(self, kind, full):
        """An object of the release, by the word that every_value.py has for it."""
        if kind == "test":
            return self.pod_of_helm_test(full)
        if kind in ("worker", "master"):
            pods = self.get("pods", "-l", "role=" + kind)["items"]
            return pods[0] if pods else None
        names = {"serviceaccount": "hvd-account"}
        return self.get(kind, names.get(kind, full))

    def pod_of_helm_test(self, full):
        with subprocess.Popen([HELM, "test", "-n", self.namespace, "mnist"],
                              stdout=subprocess.PIPE, text=True) as test:
            deadline = time.monotonic() + PATIENCE_S
            done = None
            while done is None or done.returncode != 0:
                self.assertLess(time.monotonic(), deadline, "the pod of helm test is not seen")
                done = self.kubectl("get", "pod", full + "-test", "-o", "json", check=False)
            self.assertIn("Succeeded", test.communicate(timeout=PATIENCE_S)[0])
        return json.loads(done.stdout)

    def know_pod_monitors(self):
        """The kind alone, where there is no Prometheus Operator."""
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
               "metadata": {"name": "podmonitors.monitoring.coreos.com"},
               "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced",
                        "names": {"kind": "PodMonitor", "plural": "podmonitors",
                                  "singular": "podmonitor"},
                        "versions": [{"name": "v1", "served": True, "storage": True,
                                      "schema": {"openAPIV3Schema": schema}}]}}
        name = crd["metadata"]["name"]
        if self.kubectl("get", "crd", name, check=False).returncode != 0:
            self.kubectl("create", "-f", "-", stdin=json.dumps(crd))
            self.kubectl("wait", "--for=condition=Established", "crd/" + name)

    def see(self, rows, full):
        objects = {}
        for name, value, kind, path, *wanted in rows:
            if kind not in objects:
                deadline = time.monotonic() + PATIENCE_S
                while objects.get(kind) is None:
                    self.assertLess(time.monotonic(), deadline, "there is no " + kind)
                    objects[kind] = self.one(kind, full)
            with self.subTest(name):
                wanted = wanted[0] if wanted else value
                found = every_value.at(objects[kind], path)
                self.assertTrue(every_value.holds(found, wanted),
                                "%s is %s, not %s" % (path, found, wanted))

    def test_native(self):
        self.know_pod_monitors()
        self.create_secret("hvd-secret", secret=secrets.token_hex(32))
        self.helm("install", every_value.values_of(every_value.NATIVE))
        log = self.completes("mnist-trainer")
        lines = re.findall(r"rank (\d) side (\w+) on node\d: \S+ +(\d+) ", log)
        self.assertEqual(sorted(lines), [(str(i), "worker", "99") for i in range(4)], log)
        self.see(every_value.NATIVE, "mnist-trainer")
        self.assertEqual(len(self.workers()), 2)  # worker.release is false

    def test_mpirun(self):
        with tempfile.TemporaryDirectory() as folder:
            key = pathlib.Path(folder) / "key"
            run("ssh-keygen", "-q", "-N", "", "-f", key)
            pair = {"ssh.hostKey": key.read_text(),
                    "ssh.hostKeyPub": key.with_suffix(".pub").read_text()}
        rows = []
        for name, value, *where in every_value.MPIRUN:
            if name in pair:
                value = pair[name]
                where.append(base64.b64encode(value.encode()).decode())
            rows.append((name, value, *where))
        self.helm("install", every_value.values_of(rows))
        log = self.completes("my-job")
        self.assertEqual(sorted(re.findall(r"^on (\S+)$", log, re.M)),
                         ["my-job-0", "my-job-master", "my-job-master"], log)
        self.see([row for row in rows if row[2] not in ("worker", "statefulset")], "my-job")
        self.workers_go()
        # The workers are gone: what they had is seen while a second job runs.
        values = every_value.values_of(rows)
        values["driver"]["args"] = ["sleep infinity"]
        self.helm("upgrade", values)
        self.see([row for row in rows if row[2] in ("worker", "statefulset")], "my-job")

    def test_elsewhere(self):
        self.create_secret("hvd-keys", **{"host-key": "none", "host-key-pub": "none"})
        self.helm("install", every_value.values_of(every_value.ELSEWHERE))
        self.see(every_value.ELSEWHERE, JOB)
        phases = {pod["status"]["phase"] for pod in self.get("pods")["items"]}
        self.assertEqual(phases, {"Pending"})


if __name__ == "__main__":
    unittest.main(verbosity=2)
