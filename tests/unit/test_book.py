#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pages of the book, as tools/docs.py makes them: test_book.py BUILD-DIRECTORY

Needs no MkDocs; `make docs` builds the site of them, where a warning is an error.
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1]).resolve()


class Book(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        subprocess.run([sys.executable, ROOT / "tools/docs.py", cls.folder.name, BUILD,
                        "--pages-only"], check=True)
        pages = pathlib.Path(cls.folder.name) / "pages"
        cls.pages = {path.name: path.read_text() for path in pages.glob("*.md")}
        cls.images = {f"img/{path.name}" for path in (pages / "img").iterdir()}

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_every_page_has_its_place(self):
        nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
        self.assertEqual(set(re.findall(r"[\w-]+\.md", nav)), set(self.pages))

    def test_links_lead_to_pages_of_the_book(self):
        for name, text in self.pages.items():
            text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
            for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", text):
                with self.subTest(name, target=target):
                    self.assertTrue(re.match(r"https?:", target) or target in self.pages or
                                    target in self.images)

    def test_the_reference_follows_from_the_sources(self):
        codes = re.findall(r"^STATUS\((\w+)", (ROOT / "src/base/status.def").read_text(), re.M)
        self.assertGreater(len(codes), 10)
        for code in codes:
            self.assertIn(f"| `{code}` |", self.pages["errors.md"])
        for name in ("allreduce", "DistributedOptimizer", "broadcast_parameters", "run_elastic"):
            self.assertTrue(f"\n### {name}\n" in self.pages["api.md"], name)
        self.assertFalse("\n### is_distributed\n" in self.pages["api.md"])  # not public
        self.assertIn("--host-discovery-script", self.pages["options.md"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
