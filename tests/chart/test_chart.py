# SPDX-License-Identifier: Apache-2.0
"""What the chart renders: as the golden files have it, valid for old and new Kubernetes, and
nothing at all, but a sentence with the name of the key, for values that make no sense."""
import base64
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import yaml

from cases import BAD, GOOD, KEYS

sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))
import every_value  # noqa: E402

HERE = Path(__file__).resolve().parent
CHART = HERE.parents[1] / "charts" / "horovod"
HELM = os.environ.get("HELM", "helm")
VERSIONS = ("1.25", "1.37")


def helm(*args, values=None):
    argv = [HELM, *args]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        if values is not None:
            yaml.safe_dump(values, file)
            file.flush()
            argv += ["--values", file.name]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def render(values, *args):
    done = helm("template", "mnist", str(CHART), "--namespace", "ml", *args, values=values)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return done.stdout


def objects(text):
    """-> {(kind, name): object}"""
    found = [o for o in yaml.safe_load_all(text) if o]
    return {(o["kind"], o["metadata"]["name"]): o for o in found}


def steady(text):
    """Without what is made anew in every release, what only repeats the rest, and blank lines,
    about which Helm 3 and Helm 4 do not agree."""
    for script in sorted((CHART / "files").glob("*.sh")):
        body = "".join("    " + line for line in script.read_text().splitlines(True))
        text = text.replace(body, "    (charts/horovod/files/%s)\n" % script.name)
    text = re.sub(r"^(  (host-key|secret|token|tls.crt|tls.key|ca.crt): ).*$",
                  r"\1(made for the release)", text, flags=re.M)
    text = re.sub(r"(checksum/config: ).*", r"\1(of the ConfigMap)", text)
    return "".join(line for line in text.splitlines(True) if line.strip())


class Golden(unittest.TestCase):
    def test_all(self):
        self.assertGreaterEqual(len(GOOD), 20)
        for name, values in GOOD.items():
            with self.subTest(name):
                text = steady(render(values))
                path = HERE / "golden" / (name + ".yaml")
                if os.environ.get("UPDATE_GOLDEN"):
                    path.write_text(text)
                self.assertEqual(text, path.read_text(),
                                 "tests/chart/run.sh --update BUILD writes it anew")

    def test_lint(self):
        for name in ("defaults", "seed-gpu"):
            done = helm("lint", "--strict", str(CHART), values=GOOD[name])
            self.assertEqual(done.returncode, 0, done.stdout)

    def test_valid_for_kubernetes(self):
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for name, values in GOOD.items():
                files.append(Path(folder) / (name + ".yaml"))
                files[-1].write_text(render(values))
            for version in VERSIONS:
                done = subprocess.run(
                    ["kubernetes-validate", "-k", version, "--strict", *map(str, files)],
                    capture_output=True, text=True, timeout=300)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Images(unittest.TestCase):
    def test_hadolint(self):
        files = sorted((HERE.parents[1] / "deploy").glob("**/Dockerfile*"))
        self.assertEqual(len(files), 5)
        done = subprocess.run(["hadolint", "--no-color", *map(str, files)], capture_output=True,
                              text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Refused(unittest.TestCase):
    def test_all(self):
        self.assertGreaterEqual(len(BAD), 15)
        for name, (values, key) in BAD.items():
            with self.subTest(name):
                done = helm("template", "mnist", str(CHART), values=values)
                self.assertNotEqual(done.returncode, 0)
                said = done.stderr.replace("/", ".")  # newer Helm writes paths with slashes
                self.assertIn(key, said)


class Meaning(unittest.TestCase):
    """What golden files would not explain."""

    def hostfile(self, values):
        return objects(render(values))["ConfigMap", "mnist-horovod"]["data"]["hostfile"].split("\n")

    def test_hostfile_forms(self):
        self.assertEqual(self.hostfile(GOOD["native-two"]), [
            "mnist-horovod-master slots=1", "mnist-horovod-0.mnist-horovod slots=1",
            "mnist-horovod-1.mnist-horovod slots=1"])
        self.assertEqual(self.hostfile(GOOD["intelmpi"]), [
            "mnist-horovod-master:1", "mnist-horovod-0.mnist-horovod:2",
            "mnist-horovod-1.mnist-horovod:2"])

    def test_gpus_are_slots(self):
        for name in ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/xe", "nvidia.com/mig-1g.5gb"):
            limits = {name: "2", "cpu": 8, "gpu.intel.com/millicores": 900}
            self.assertEqual(self.hostfile({"resources": {"limits": limits}})[0],
                             "mnist-horovod-master slots=2")
        self.assertEqual(self.hostfile(GOOD["gpu-slots"])[0], "mnist-horovod-master slots=4")
        self.assertEqual(self.hostfile(GOOD["gpu-workers-only"]), [
            "mnist-horovod-0.mnist-horovod slots=4", "mnist-horovod-1.mnist-horovod slots=4"])

    def test_the_key_keeps_its_last_newline(self):
        secret = objects(render(GOOD["seed-gpu"]))["Secret", "mnist-horovod"]["data"]
        self.assertFalse(KEYS["hostKey"].endswith("\n"))
        self.assertEqual(base64.b64decode(secret["host-key"]).decode(), KEYS["hostKey"] + "\n")

    def test_a_secret_of_its_own_for_each_release(self):
        made = [base64.b64decode(objects(render({}))["Secret", "mnist-horovod"]["data"]["secret"])
                for _ in range(2)]
        self.assertNotEqual(*made)
        for secret in made:
            self.assertRegex(secret.decode(), "^[0-9a-f]{64}$")

    def test_other_keys_need_other_workers(self):
        other = dict(GOOD["seed-gpu"], ssh=dict(KEYS, hostKeyPub="ssh-ed25519 AAAAother"))
        marks = {objects(render(values))["StatefulSet", "mnist-horovod"]["spec"]["template"]
                 ["metadata"]["annotations"]["checksum/config"]
                 for values in (GOOD["seed-gpu"], GOOD["seed-gpu"], other)}
        self.assertEqual(len(marks), 2)

    def test_no_resources_are_none(self):
        found = objects(render({"resources": None, "worker": {"resources": None}}))
        for kind in ("StatefulSet", "Job"):
            spec = found[kind, "mnist-horovod"]["spec"]["template"]["spec"]
            self.assertEqual(spec["containers"][0]["resources"], {})

    def test_environment_stays_on_its_side(self):
        found = objects(render(GOOD["environment"]))

        def names(kind, container=0):
            spec = found[kind, "mnist-horovod"]["spec"]["template"]["spec"]
            return {e["name"] for e in spec["containers"][container]["env"]}
        self.assertLessEqual({"W", "FLAG"}, names("StatefulSet"))
        self.assertLessEqual({"M", "NODE"}, names("Job"))
        self.assertFalse({"M", "NODE"} & names("StatefulSet"))
        self.assertFalse({"W", "FLAG"} & names("Job"))

    def test_an_upgrade_makes_another_job(self):
        found = objects(render({}, "--is-upgrade"))
        jobs = [name for kind, name in found if kind == "Job"]
        self.assertEqual(jobs, ["mnist-horovod-r1"])

    def test_native_pods_are_restricted(self):
        found = objects(render({}))
        for kind in ("StatefulSet", "Job"):
            spec = found[kind, "mnist-horovod"]["spec"]["template"]["spec"]
            self.assertTrue(spec["securityContext"]["runAsNonRoot"])
            self.assertEqual(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault")
            for container in spec["containers"]:
                context = container["securityContext"]
                self.assertFalse(context["allowPrivilegeEscalation"])
                self.assertEqual(context["capabilities"], {"drop": ["ALL"]})

    def test_names_leave_room_for_the_pods_number(self):
        found = objects(render(GOOD["long-names"]))
        for _, name in found:
            self.assertLessEqual(len(name + "-10000"), 63)

    def table(self):
        argv = ["python3", str(HERE / "values_table.py"), str(CHART / "values.yaml")]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def test_the_cluster_sees_every_value(self):
        """tests/cluster sets each row of the table to something else: no row is left out there."""
        rows = set(re.findall(r"^\| `(\S+)` \|", self.table(), re.M))
        seen = {row[0] for rows in every_value.RELEASES.values() for row in rows}
        self.assertEqual(rows ^ seen, set())
        for name, release in every_value.RELEASES.items():
            with self.subTest(name):
                render(every_value.values_of(row for row in release if row[1] is not None))

    def test_the_example_renders(self):
        root = HERE.parents[1]
        done = subprocess.run([root / "examples/launch/kubernetes.sh", "registry.example.com/team"],
                              cwd=root, env={**os.environ, "HELM": f"{HELM} template"}, text=True,
                              capture_output=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        job = objects(done.stdout)["Job", "mnist-horovod"]["spec"]["template"]["spec"]
        self.assertEqual(job["containers"][0]["image"], "registry.example.com/team/horovod-c:1.0.0")
        self.assertIn("horovodrun -np 3 python", " ".join(job["containers"][0]["args"]))

    def test_readme_has_every_value(self):
        readme = (CHART / "README.md").read_text()
        table = self.table()
        if os.environ.get("UPDATE_GOLDEN"):
            readme = readme[:readme.index(table[:table.index("\n")])] + table
            (CHART / "README.md").write_text(readme)
        self.assertIn(table, readme, "charts/horovod/README.md: the table is not that of "
                      "tests/chart/values_table.py")


if __name__ == "__main__":
    unittest.main()
