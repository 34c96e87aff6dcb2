#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the book: docs.py FOLDER BUILD_DIRECTORY [--pages-only]

The pages of docs/ and those of other folders that belong to them are copied to FOLDER/pages, where
links that leave them are made plain text, and what follows from the sources is added: the Python
interface from its stubs and docstrings, the options of horovodrun, the errors. MkDocs makes the
site, in FOLDER/site, as mkdocs.yml says; a warning is an error.
"""
import ast
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# what else belongs to the book: file -> its name there
OTHERS = {"README.md": "front.md", "CONTRIBUTING.md": "contributing.md",
          "CHANGELOG.md": "changelog.md", "SECURITY.md": "reporting.md",
          "charts/horovod/README.md": "chart.md", "deploy/openpai/README.md": "openpai-image.md",
          "deploy/spark/README.md": "spark-image.md", "examples/README.md": "examples.md",
          "tests/fault/README.md": "faults.md", "tests/gpu/README.md": "simulated-gpu.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
# package -> the file whose names are its public ones, and those that say what they are
FACES = {
    "horovod": ("__init__.py", ["runner/__init__.py"]),
    "horovod.torch": ("torch/__init__.pyi", [
        "torch/__init__.pyi", "torch/mpi_ops.py", "torch/functions.py", "torch/optimizer.py",
        "torch/sync_batch_norm.py"]),
    "horovod.tensorflow": ("tensorflow/__init__.py", [
        "tensorflow/mpi_ops.py", "tensorflow/collectives.py", "tensorflow/functions.py",
        "tensorflow/gradients.py", "tensorflow/optimizer.py"]),
    "horovod.keras": ("keras/__init__.py", ["keras/__init__.py", "_keras/face.py"]),
    "horovod.keras.callbacks": ("_keras/callbacks.py", ["_keras/callbacks.py"]),
    "horovod.spark": ("spark/__init__.py", ["spark/launch.py", "spark/elastic.py"]),
    "horovod.spark.data": (None, ["spark/data.py"]),
    "The same in all": ("common/basics.py", ["common/basics.py"]),
    "Process sets": ("common/process_sets.py", ["common/process_sets.py"]),
}
ONLY = {"horovod.spark.data": {"ParquetReader"},
        "horovod.keras.callbacks": {"BroadcastGlobalVariablesCallback", "MetricAverageCallback",
                                    "LearningRateScheduleCallback", "LearningRateWarmupCallback"}}


def place_of(path):
    """Where a file of the tree is in the book, or None."""
    relative = os.path.relpath(path, ROOT)
    if relative in OTHERS:
        return OTHERS[relative]
    return os.path.relpath(relative, "docs") if relative.startswith("docs/") else None


def moved(text, source):
    """The page with its links as they lead from its place in the book."""
    def link(match):
        image, label, path, anchor = match.groups()
        if not path or re.match(r"\w+:", path):
            return match[0]
        target = (source.parent / path).resolve()
        place = place_of(target)
        if place is None or not target.is_file():
            return label
        return f"{image}[{label}]({place}{anchor or ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)  # listings stay as they are
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def signature(node):
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def members(path):
    """Public functions and classes of a file, with what they say about themselves."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, signature(node), ast.get_docstring(node) or ""


def public_names(path):
    """What a file defines or imports under a name without an underscore."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" \
                and isinstance(node.value, ast.List):
            return set(re.findall(r"\w+", ast.unparse(node.value)))
    return names


def interface():
    lines = ["# Python interface", "", "From the stubs and docstrings of the package.", ""]
    package = ROOT / "python/horovod"
    for module, (face, files) in FACES.items():
        lines += [f"## {module}", ""]
        public = ONLY.get(module) or public_names(package / face)
        texts, signatures = {}, {}
        for file in files:
            for name, said, text in members(package / file):
                if name in public:
                    signatures.setdefault(name, said)
                    texts[name] = texts.get(name) or text
        for name, said in sorted(signatures.items(), key=lambda item: item[0].lower()):
            lines += [f"### {name}", "", "```python", said, "```", ""]
            if texts[name]:
                lines += ["```text", texts[name], "```", ""]
    return "\n".join(lines)


def errors():
    rows = re.findall(r'^STATUS\((\w+), (\w+), "(.*?)", "(.*?)"\)',
                      (ROOT / "src/base/status.def").read_text(), re.M)
    lines = ["# Errors", "", "From `src/base/status.def`; the message of an error has more.", "",
             "| code | concerns | means | what to try |", "|---|---|---|---|"]
    lines += [f"| `{code}` | {scope.lower()} | {text} | {hint} |" for code,
              scope, text, hint in rows]
    return "\n".join(lines) + "\n"


def options(build):
    said = subprocess.run([build / "horovodrun", "--help"], capture_output=True, text=True,
                          check=True, env={**os.environ, "COLUMNS": "100"}).stdout
    return f"# Options of horovodrun\n\n```text\n{said}```\n"


def main():
    folder, build = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    pages = folder / "pages"
    subprocess.run(["rm", "-rf", pages, folder / "site"], check=True)
    (pages / "img").mkdir(parents=True)
    for image in (ROOT / "docs/img").iterdir():
        (pages / "img" / image.name).write_bytes(image.read_bytes())
    sources = [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in OTHERS)]
    for source in sources:
        name = "index.md" if source == ROOT / "docs/README.md" else place_of(source)
        text = moved(source.read_text(), source).replace("](README.md", "](index.md")
        (pages / name).write_text(text)
    (pages / "api.md").write_text(interface())
    (pages / "errors.md").write_text(errors())
    (pages / "options.md").write_text(options(build))
    if "--pages-only" not in sys.argv:
        subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict",
                        "--config-file", ROOT / "mkdocs.yml", "--site-dir", folder / "site"],
                       check=True, env={**os.environ, "HVD_PAGES": str(pages),
                                        "NO_MKDOCS_2_WARNING": "1"})
        print(f"docs: {folder / 'site/index.html'}")


if __name__ == "__main__":
    main()
