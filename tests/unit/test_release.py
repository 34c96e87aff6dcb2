#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The programs of tools/release that need no compiler: equal bytes, whole links, true digests.

`make release` checks what they make of the whole tree, `make test-release` installs it.
"""
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools/release"
DATE = "1700000000"


def run(tool, *arguments):
    done = subprocess.run([sys.executable, TOOLS / tool, *map(str, arguments)], check=True,
                          capture_output=True, text=True,
                          env={**os.environ, "SOURCE_DATE_EPOCH": DATE})
    return done.stdout


class Release(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.work = pathlib.Path(self.folder.name)

    def described(self, *home):
        tree = self.work / "tree"
        tree.mkdir(exist_ok=True)
        for name in ("README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, tree)
        run("describe.py", tree, *home)
        text = (tree / "DESCRIPTION.md").read_text()
        return (tree / "pyproject.toml").read_text(), re.findall(r"\]\(([^)\s]+)\)", text)

    def test_links_of_the_description_work_or_are_not_there(self):
        project, links = self.described()
        self.assertEqual([link for link in links if not link.startswith(("https://", "#"))], [])
        self.assertNotIn("[project.urls]", project)
        self.assertIn('readme = "DESCRIPTION.md"', project)
        home = "https://example.org/team/horovod"
        project, links = self.described(home)
        self.assertIn(f'Homepage = "{home}"', project)
        inside = [link for link in links if link.startswith(home)]
        self.assertGreater(len(inside), 10)
        for link in inside:
            path = re.sub(r"^/(blob|raw)/v[\d.]+/", "", link[len(home):]).partition("#")[0]
            self.assertTrue((ROOT / path).exists(), link)

    def test_a_wheel_packed_again_has_the_same_bytes(self):
        packed = []
        for turn, names in enumerate((["b.py", "a-1.dist-info/RECORD", "a.py"],
                                      ["a.py", "b.py", "a-1.dist-info/RECORD"])):
            folder = self.work / str(turn)
            folder.mkdir()
            with zipfile.ZipFile(self.work / "a.whl", "w") as wheel:
                for name in names:
                    entry = zipfile.ZipInfo(name, (2001 + turn, 1, 1, 0, 0, 0))
                    entry.external_attr = 0o100664 << 16
                    wheel.writestr(entry, "text of " + name)
            run("pack.py", self.work / "a.whl", folder)
            packed.append((folder / "a.whl").read_bytes())
        self.assertEqual(*packed)
        with zipfile.ZipFile(self.work / "1/a.whl") as wheel:
            self.assertEqual(wheel.namelist(), ["a.py", "b.py", "a-1.dist-info/RECORD"])

    def test_the_artefact_of_the_chart_is_whole(self):
        chart, out = ROOT / "charts/horovod/Chart.yaml", self.work / "chart.oci.tar"
        package = self.work / "horovod-1.tgz"
        package.write_bytes(b"a package")
        (self.work / "horovod-1.tgz.prov").write_bytes(b"where it is from")
        run("oci.py", chart, package, out)
        first = out.read_bytes()
        run("oci.py", chart, package, out)
        self.assertEqual(out.read_bytes(), first)
        with tarfile.open(out) as layout:
            def blob(descriptor):
                kind, _, digest = descriptor["digest"].partition(":")
                data = layout.extractfile(f"blobs/{kind}/{digest}").read()
                self.assertEqual(hashlib.sha256(data).hexdigest(), digest)
                self.assertEqual(len(data), descriptor["size"])
                return data
            index = json.load(layout.extractfile("index.json"))
            manifest = json.loads(blob(index["manifests"][0]))
            self.assertEqual(json.loads(blob(manifest["config"]))["name"], "horovod")
            self.assertEqual([blob(layer) for layer in manifest["layers"]],
                             [b"a package", b"where it is from"])

    def test_the_components_are_those_that_are_built(self):
        bom = json.loads(run("sbom.py", ROOT, "1.0.0"))
        found = {part["name"]: part for part in bom["components"]}
        for name, script in (("openssl", "openssl.sh"), ("curl", "curl.sh"),
                             ("libyaml", "release/toolchain.sh"),
                             ("jansson", "release/toolchain.sh")):
            text = (ROOT / "tools" / script).read_text()
            self.assertIn(found[name]["version"], text)
            self.assertIn(found[name]["hashes"][0]["content"], text)
        self.assertEqual(bom, json.loads(run("sbom.py", ROOT, "1.0.0")))


if __name__ == "__main__":
    unittest.main()
