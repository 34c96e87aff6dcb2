#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prepares a copy of the tree for its source package: describe.py TREE [HOME_URL]

The front page becomes the long description on a package index, where relative links lead nowhere.
With HOME_URL, the place where the sources are published, they become links into it, and the
metadata names it. Without it they become plain text: better no link than a dead one.
"""
import pathlib
import re
import sys

LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def absolute(text, home, version):
    def target(match):
        image, label, path = match.groups()
        if not home:
            return "" if image else label
        kind = "raw" if image else "blob"
        return f"{image}[{label}]({home}/{kind}/v{version}/{path})"
    return LINK.sub(target, text)


def main():
    tree = pathlib.Path(sys.argv[1])
    home = sys.argv[2].rstrip("/") if len(sys.argv) > 2 else ""
    project = (tree / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"', project, re.MULTILINE)[1]
    text = absolute((tree / "README.md").read_text(), home, version)
    (tree / "DESCRIPTION.md").write_text(text)
    project = project.replace('readme = "README.md"', 'readme = "DESCRIPTION.md"')
    if home:
        project = project.replace("[project.optional-dependencies]", f"""[project.urls]
Homepage = "{home}"
Documentation = "{home}/blob/v{version}/docs/README.md"
Changelog = "{home}/blob/v{version}/CHANGELOG.md"
Issues = "{home}/issues"

[project.optional-dependencies]""")
    (tree / "pyproject.toml").write_text(project)


if __name__ == "__main__":
    main()
