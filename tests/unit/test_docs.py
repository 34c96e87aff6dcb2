#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves that the documentation is true of the tree it stands in.

Usage: test_docs.py BUILD-DIRECTORY [unittest arguments]

Pages: links lead somewhere; paths, make targets, knobs, options and identifiers exist; the index
misses no page, the tour no file; the front page is short; the generated page is up to date.
Programs: the listing of docs/embedding.md and examples/c/allreduce.c are built and run, alone and
as jobs of three ranks. hvd-info: its views, and that it tells the routes which the engine takes.
"""
import ctypes
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("charts/*/*.md"),
                *ROOT.glob("tests/*/*.md")])
FRONT_PAGE_LINES = 120
TIMEOUT_S = 20
# With an underscore, and not a part of a path.
IDENTIFIER = r"(?<![\w./<-])[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+\b(?![./])"

# --- What is there --------------------------------------------------------------------------------


@functools.cache
def page(path):
    return path.read_text()


def short(path):
    return str(path.relative_to(ROOT))


def pages():
    return [(path, page(path)) for path in PAGES]


LISTING = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.M | re.S)


def listings(path, language):
    return [text for name, text in LISTING.findall(page(path)) if name == language]


def without_listings(text):
    return LISTING.sub("", text)


def backticked(text):
    return re.findall(r"`([^`\n]+)`", without_listings(text))


@functools.cache
def known_words():
    files = [ROOT / "include/hvd.h", *ROOT.glob("src/*/*.*"), *ROOT.glob("tools/*"),
             *ROOT.glob("python/**/*.py"), *ROOT.glob("tests/spark/*.py"),
             *ROOT.glob("tests/cluster/*.py"), *ROOT.glob("tests/gpu/*.[ch]"),
             *ROOT.glob("deploy/**/Dockerfile"),
             ROOT / "tests/tests.list"]
    return set(re.findall(r"\w+", "\n".join(file.read_text() for file in files if file.is_file())))


@functools.cache
def knobs():
    return set(re.findall(r'"(HOROVOD_\w+)"', (ROOT / "src/base/knobs.def").read_text()))


@functools.cache
def variables():
    """Every variable some part of the tree knows."""
    sources = [ROOT / "src/base/config.c", *ROOT.glob("src/cli/*.*"),
               *ROOT.glob("src/agent/*.*"), *ROOT.glob("src/launch/*.*"),
               *ROOT.glob("python/**/*.py")]
    text = "\n".join(source.read_text() for source in sources)
    return knobs() | set(re.findall(r"\bHOROVOD_[A-Z0-9_]*[A-Z0-9]\b", text))


def slug(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def run(*command, expect=0, **options):
    """What the command prints. One that hangs is killed with everything it has started."""
    child = subprocess.Popen([str(word) for word in command], text=True, start_new_session=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        output, errors = child.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
    if child.returncode != expect:
        raise AssertionError(f"{command} ended with {child.returncode}, not {expect}:\n"
                             f"{output}{errors}")
    return output


# --- Pages ----------------------------------------------------------------------------------------


class Pages(unittest.TestCase):
    def test_links_lead_somewhere(self):
        for path, text in pages():
            for target in re.findall(r"\]\(([^)\s]+)\)", without_listings(text)):
                if re.match(r"https?:|mailto:", target):
                    continue
                name, _, anchor = target.partition("#")
                file = (path.parent / name).resolve() if name else path
                self.assertTrue(file.exists(), f"{short(path)} links to {target}")
                if anchor:
                    headings = re.findall(r"^#+ (.*)$", page(file), flags=re.M)
                    slugs = [slug(heading) for heading in headings]
                    self.assertIn(anchor, slugs, short(path))

    def test_paths_exist(self):
        start = r"(?:src|include|docs|tests|tools|examples|bench)/"
        for path, text in pages():
            for token in re.findall(rf"(?<![\w/.<-]){start}[\w./<>*-]*", text):
                token = token.rstrip(".")
                if "<" not in token and "*" not in token:
                    self.assertTrue((ROOT / token).exists(), f"{short(path)} names {token}")

    def test_make_targets_exist(self):
        makefile = (ROOT / "Makefile").read_text()
        targets = set(re.findall(r"^([a-z][\w-]*):", makefile, flags=re.M))
        named = set()
        for path, text in pages():
            code = listings(path, "sh") + backticked(text)
            named.update(re.findall(r"^make ([a-z][\w-]*)", "\n".join(code), flags=re.M))
        self.assertLessEqual({"demo", "test"}, named)
        self.assertEqual(named - targets, set())

    def test_knobs_exist(self):
        for path, text in pages():
            named = set(re.findall(r"\bHOROVOD_[A-Z0-9_]*[A-Z0-9]\b", text))
            self.assertEqual(named - variables(), set(), short(path))

    def test_identifiers_exist(self):
        for path, text in pages():
            for token in backticked(text):
                for name in re.findall(IDENTIFIER, token):
                    is_test = (ROOT / "tests/unit" / f"{name}.c").exists()
                    self.assertTrue(is_test or name in known_words(), f"{short(path)}: {name}")

    def test_tool_options_exist(self):
        usages = {"hvd-info": run(BUILD / "hvd-info", "--help"),
                  "hvd-bench": (ROOT / "src/tools/hvd-bench.c").read_text(),
                  "horovodrun": run(BUILD / "horovodrun", "--help") +
                  run(BUILD / "horovodrun", "pai", "--help") +
                  (ROOT / "src/cli/options.def").read_text()}
        named = re.compile(r"(hvd-info|hvd-bench|horovodrun)((?:[ \n]+[\w,.-]+)+)")
        for path, text in pages():
            for tool, words in named.findall(text):
                for option in re.findall(r"(?<=\s)--([a-z-]+)", words):
                    self.assertRegex(usages[tool], rf'(--|"){option}\b', f"{short(path)}: {tool}")

    def test_front_page_is_short(self):
        self.assertLessEqual(len(page(ROOT / "README.md").splitlines()), FRONT_PAGE_LINES)

    def test_index_misses_no_page(self):
        index = ROOT / "docs/README.md"
        linked = {(index.parent / target).resolve()
                  for target in re.findall(r"\]\(([^)#\s]+)", page(index))}
        missing = {path for path in PAGES if path != index} - linked
        self.assertEqual({path.name for path in missing}, set(), "not in docs/README.md")

    def part_of_tour(self, directory):
        tour = page(ROOT / "docs/tour.md")
        part = re.search(rf"^## {directory}/$(.*?)(?=^## |\Z)", tour, flags=re.S | re.M)
        self.assertTrue(part, f"docs/tour.md has no part about {directory}/")
        return part.group(1)

    def test_tour_misses_no_file(self):
        for module in sorted(path for path in ROOT.glob("src/*") if path.is_dir()):
            part = self.part_of_tour(f"src/{module.name}")
            named = set(re.findall(r"`([\w-]+\.(?:c|h|def|inc))`", part))
            there = {file.name for file in module.iterdir()}
            self.assertEqual(named - there, set(), f"in the tour, not in src/{module.name}/")
            sources = {name for name in there if name.endswith((".c", ".def", ".inc"))}
            headers = {name for name in there if name.endswith(".h")}
            sources |= {name for name in headers if f"{name[:-2]}.c" not in there}
            self.assertEqual(sources - named, set(), f"in src/{module.name}/, not in the tour")

    def test_tour_of_python_is_true(self):
        named = re.findall(r"`([\w/]+\.py)`", self.part_of_tour("python/horovod"))
        self.assertGreater(len(named), 10)
        for name in named:
            self.assertTrue((ROOT / "python/horovod" / name).exists(), f"docs/tour.md names {name}")

    def test_demo_is_what_the_bench_prints(self):
        listing, = listings(ROOT / "docs/README.md", "")
        lines = [line for line in listing.splitlines() if line]
        source = re.sub(r'"\s*"', "", (ROOT / "src/tools/hvd-bench.c").read_text())
        said = [line for line in lines if not line.startswith("  ")]
        self.assertGreater(len(said), 1)
        for line in said:
            self.assertIn(line, source)
        rows = [line.split() for line in lines if line.endswith("correct")]
        sizes = ["4", "65536", "1048576", "16777216"]
        self.assertEqual([row[2] for row in rows], sizes * len(said))
        heads = [line.split() for line in lines if line.endswith("GB/s")]
        columns = run(BUILD / "hvd-bench", "--ranks", 1, "--bytes", 4, "--max-samples", 1,
                      env=clean_environment()).splitlines()[0].split()
        self.assertEqual(heads, [columns] * len(said))

    def test_knobs_page_is_up_to_date(self):
        self.assertEqual(page(ROOT / "docs/knobs.md"), run(BUILD / "hvd-info", "--markdown-knobs"),
                         "run: build/hvd-info --markdown-knobs > docs/knobs.md")


# --- Programs -------------------------------------------------------------------------------------


def library():
    lib = ctypes.CDLL(str(BUILD / "libhvd.so"))
    lib.hvd_rendezvous_start.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p,
                                         ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p,
                                         ctypes.c_size_t]
    lib.hvd_rendezvous_port.argtypes = [ctypes.c_void_p]
    lib.hvd_rendezvous_stop.argtypes = [ctypes.c_void_p]
    return lib


def clean_environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}


def run_job(command, size):
    """Starts the ranks as docs/embedding.md says; what each of them printed."""
    lib = library()
    secret = os.urandom(32)
    server = ctypes.c_void_p()
    text = ctypes.create_string_buffer(1024)
    if lib.hvd_rendezvous_start(None, 0, secret, ctypes.byref(server), text, len(text)) != 0:
        raise AssertionError(text.value.decode())
    ranks = []
    for rank in range(size):
        reader, writer = os.pipe()
        os.write(writer, secret.hex().encode())
        os.close(writer)
        environment = clean_environment() | {
            "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size), "HOROVOD_SECRET_FD": str(reader),
            "HOROVOD_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_RENDEZVOUS_PORT": str(lib.hvd_rendezvous_port(server))}
        ranks.append(subprocess.Popen([str(word) for word in command], env=environment, text=True,
                                      pass_fds=[reader], stdout=subprocess.PIPE))
        os.close(reader)
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        lib.hvd_rendezvous_stop(server)
    if any(rank.returncode != 0 for rank in ranks):
        raise AssertionError(f"{command}: {[rank.returncode for rank in ranks]}, {outputs}")
    return outputs


class Programs(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)

    def compile(self, source):
        program = self.directory / source.stem
        run("cc", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", source, f"-L{BUILD}",
            "-lhvd", f"-Wl,-rpath,{BUILD}", "-o", program)
        return program

    def test_listing_of_the_page(self):
        text = page(ROOT / "docs/embedding.md")
        source = self.directory / "average.c"
        source.write_text(listings(ROOT / "docs/embedding.md", "c")[0])
        program = self.compile(source)
        alone = run(program, env=clean_environment())
        self.assertEqual(alone, "rank 0 of 1: 0 1 2 3\n")
        self.assertIn(f"`{alone.strip()}`", text)
        self.assertEqual(run_job([program], 3), [f"rank {r} of 3: 1 2 3 4\n" for r in range(3)])

    def test_example(self):
        program = self.compile(ROOT / "examples/c/allreduce.c")
        lines = run(program, 3, env=clean_environment()).splitlines()
        self.assertEqual(sorted(lines), [f"rank {r} of 3: 1 2 3 4" for r in range(3)])
        run(program, 0, env=clean_environment(), expect=2)


# --- hvd-info -------------------------------------------------------------------------------------


def info(*words, env=None, **options):
    return run(BUILD / "hvd-info", *words, env=clean_environment() | (env or {}), **options)


SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def told_route(told, op, size):
    """The first word of what hvd-info --algorithms says about an operation and a size."""
    number = r"(\d+) (B|KiB|MiB)"
    for line in told.split("chosen for")[1].splitlines():
        match = re.match(rf"  {op} +(?:all sizes|{number}(?: to {number})?) +(\w+):", line)
        if match:
            first, unit, last, last_unit, route = match.groups()
            low = int(first) * SIZE_UNITS[unit] if first else 0
            high = int(last) * SIZE_UNITS[last_unit] if last else low if first else 1 << 40
            if low <= size <= high:
                return route
    raise AssertionError(f"nothing about {op} of {size} bytes in\n{told}")


class Info(unittest.TestCase):
    def test_views(self):
        for view, expected in [("--build", "vector kernels"), ("--knobs", "HOROVOD_CYCLE_TIME"),
                               ("--algorithms", "two_level"), ("--launcher", "nobody"),
                               ("--transports", "listens")]:
            with self.subTest(view=view):
                self.assertIn(expected, info(view))
        self.assertIn("vector kernels", info())

    def test_wrong_options(self):
        for words in [["--nonsense"], ["--ranks"], ["--ranks", "0"], ["--ranks", "2x"],
                      ["--ranks", "2", "--hosts", "3"]]:
            with self.subTest(words=words):
                info(*words, expect=2)

    def test_knobs_tell_value_and_origin(self):
        lines = info("--knobs", env={"HOROVOD_CYCLE_TIME": "2.5"}).splitlines()
        cells = {line.split()[0]: line.split()[1:4] for line in lines[2:]}
        self.assertEqual(cells["HOROVOD_CYCLE_TIME"], ["2.5", "environment", "0"])
        self.assertEqual(cells["HOROVOD_TREE_ARITY"], ["8", "default", "8"])
        self.assertEqual(set(cells), knobs())
        info("--knobs", env={"HOROVOD_CYCLE_TIME": "soon"}, expect=1)

    def test_transports_here(self):
        self.assertRegex(info("--transports"), "to ranks on other hosts +tcp +not shm: on another")
        only_tcp = info("--transports", env={"HOROVOD_TRANSPORTS": "tcp"})
        self.assertRegex(only_tcp, "to ranks on this host +tcp")
        self.assertIn("no job can start here",
                      info("--transports", env={"HOROVOD_GLOO_IFACE": "nosuch0"}))

    def test_transports_of_a_job(self):
        for rank, told in enumerate(run_job([BUILD / "hvd-info", "--transports"], 3)):
            self.assertIn(f"transports of rank {rank} of 3", told)
            for peer in {0, 1, 2} - {rank}:
                self.assertRegex(told, rf"from rank {rank} to rank {peer} +shm")

    def test_routes_are_those_the_engine_takes(self):
        for op, ranks, hosts, sizes in [("allreduce", 4, 2, [1024, 8192, 16384, 32768, 131072]),
                                        ("allreduce", 2, 1, [1024, 8192]),
                                        ("allreduce", 2, 2, [1024, 65536]),
                                        ("allgather", 4, 2, [65536]),
                                        ("broadcast", 2, 1, [64])]:
            told = info("--algorithms", "--ranks", ranks, "--hosts", hosts)
            with self.subTest(op=op, ranks=ranks, hosts=hosts), tempfile.TemporaryDirectory() as at:
                trace = pathlib.Path(at) / "trace.json"
                run(BUILD / "hvd-bench", "--op", op, "--ranks", ranks, "--hosts", hosts, "--bytes",
                    ",".join(map(str, sizes)), "--max-samples", 3, "--budget", 0.01,
                    "--env", f"HOROVOD_TIMELINE={trace}", env=clean_environment())
                taken = self.routes_in(trace)
                for size in sizes:
                    expected = {told_route(told, op, size)}
                    # The board is tried first, for what is small and repeated inside a host.
                    self.assertEqual(expected, taken[f"bench.{op}.{size}"] - {"board"}, size)

    @staticmethod
    def routes_in(trace):
        names, routes = {}, {}
        for event in json.loads(trace.read_text()):
            track = event["pid"], event.get("tid")
            if event["name"] == "thread_name":
                names[track] = event["args"]["name"]
            elif (event["ph"] == "X" and "_" in event["name"] and
                  not event["name"].startswith("NEGOTIATE_")):
                route = event["name"].rpartition("_")[0].lower()
                routes.setdefault(names[track], set()).add(route)
        return routes


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
