#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The recipe "An operation" of CONTRIBUTING.md, carried out: a gather to one rank.

A copy of the tree gets the lines below and is built; ranks then use the operation through
hvd_submit() over shared memory, TCP and both. What the copy has that the tree has not is counted.

Usage: test_operation.py BUILD-DIRECTORY [unittest arguments]
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLACE = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve() / "recipe_operation"
TREE, BUILD = PLACE / "tree", PLACE / "build"
MOST_FILES = 5
TIMEOUT_S = 600

# What the recipe says, step by step: a file, the text before which the new lines go, the lines.
STEPS = [
    ("include/hvd.h", "    HVD_N_OPS\n", "    HVD_GATHER,\n"),
    ("src/base/ops.def", "\n// Agreed upon like the others",
     'OP(HVD_GATHER, "gather", "GATHER", "Gather", GATHERED, PER_TENSOR, '
     "OP_ROOTED | OP_FUSES | OP_NEEDS_ROWS)\n"),
    ("src/coll/plan.h", "\n#endif\n", "plan_fn_t plan_gather_direct;\n"),
    ("src/coll/coll.c", "};\nconst int coll_n_algorithms",
     '    {HVD_GATHER, "direct", 0, plan_gather_direct, "any blocks: one step"},\n'),
]
NEW_FILES = {"src/coll/gather.c": HERE / "operation/gather.c"}
# It takes no other test's place, and counts as none of the files of the recipe.
OWN_TEST = {"tests/ranks/test_gather.c": HERE / "operation/test_gather.c"}
COPIED = ["CMakeLists.txt", "include", "src", "examples/c", "tests"]


def copied_files():
    for name in COPIED:
        path = ROOT / name
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                yield str(file.relative_to(ROOT)), file


def wanted():
    """What the copy is to have: path -> bytes."""
    files = {name: file.read_bytes() for name, file in copied_files()}
    for name, file in {**NEW_FILES, **OWN_TEST}.items():
        assert name not in files, f"{name} is in the tree already"
        files[name] = file.read_bytes()
    for name, mark, lines in STEPS:
        text = files[name].decode()
        assert text.count(mark) == 1, f"{name} has {text.count(mark)} places to add to, not one"
        files[name] = text.replace(mark, lines + mark).encode()
    return files


def make_tree():
    """Writes only what has changed since the last time, so that only this is compiled again."""
    files = wanted()
    for old in [file for file in TREE.rglob("*") if file.is_file()]:
        if str(old.relative_to(TREE)) not in files:
            old.unlink()
    for name, content in files.items():
        path = TREE / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def changed_files():
    """Files of the copy that are new or differ, found by looking."""
    tree = {str(file.relative_to(TREE)) for file in TREE.rglob("*") if file.is_file()}
    return sorted(name for name in tree - set(OWN_TEST)
                  if not (ROOT / name).is_file() or
                  (ROOT / name).read_bytes() != (TREE / name).read_bytes())


def run(*words, **more):
    result = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, text=True,
                            stderr=subprocess.STDOUT, timeout=TIMEOUT_S, **more)
    if result.returncode != 0:
        raise AssertionError(f"{words[0]} ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


def build_tree():
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if not (BUILD / "CMakeCache.txt").is_file():  # Debug: compiles fast, and checks base/guard.h
        run("cmake", "-S", TREE, "-B", BUILD, *generator, "-DCMAKE_BUILD_TYPE=Debug",
            "-DHVD_PYTHON=OFF", f"-DCURL_ROOT={ROOT / 'build-curl'}")
    run("cmake", "--build", BUILD, "--parallel", os.cpu_count(), "--target", "test_gather",
        "--target", "hvd-info", "--target", "hvd-bench")


class Operation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        make_tree()
        build_tree()

    def test_it_touches_few_files(self):
        changed = changed_files()
        self.assertEqual(changed, sorted({name for name, *_ in STEPS} | set(NEW_FILES)))
        self.assertLessEqual(len(changed), MOST_FILES, changed)

    def test_the_recipe_names_them(self):
        text = (ROOT / "CONTRIBUTING.md").read_text()
        recipe = re.search(r"\n### An operation\n(.*?)\n##", text, re.S).group(1)
        for name in changed_files():
            name = "src/coll/<family>.c" if name in NEW_FILES else name
            self.assertIn(f"`{name}`", recipe)

    def ranks(self, *words):
        run(BUILD / "tests/test_gather", *words)

    def test_on_one_host(self):
        self.ranks("--ranks", "1,2,3,4", "--layout", "one")

    def test_over_tcp(self):
        self.ranks("--ranks", "2,3", "--layout", "one", "--env", "HOROVOD_TRANSPORTS=tcp")
        self.ranks("--ranks", "2,4", "--layout", "apart")

    def test_over_both(self):
        self.ranks("--ranks", "3,4", "--layout", "blocks,woven")

    def test_it_is_listed(self):
        text = run(BUILD / "hvd-info", "--algorithms")
        self.assertRegex(text, r"(?m)^ *gather +direct +any blocks: one step$")
        self.assertRegex(text, r"(?m)^ *gather +all sizes +plan: direct$")

    def test_it_is_measured(self):
        text = run(BUILD / "hvd-bench", "--op", "gather", "--ranks", "3", "--bytes", "12,100000",
                   "--budget", "0.1")
        self.assertEqual(len(re.findall(r"(?m)^ *gather .* correct$", text)), 2, text)

    def test_it_can_be_forced(self):
        self.ranks("--ranks", "2", "--layout", "one", "--only", "root",
                   "--env", "HOROVOD_ALGORITHM=gather=direct")
        with self.assertRaisesRegex(AssertionError, "choose from: direct"):
            self.ranks("--ranks", "2", "--layout", "one", "--only", "root",
                       "--env", "HOROVOD_ALGORITHM=gather=ring")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2)
