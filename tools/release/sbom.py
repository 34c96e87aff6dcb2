#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints what a release consists of, as CycloneDX 1.6: sbom.py TREE VERSION

The libraries that are linked in (name, version and hash are those that the scripts in tools/ build
from), and the Python packages that it asks for. Equal inputs give equal bytes: the serial number
follows from the contents.
"""
import json
import os
import pathlib
import re
import sys
import time
import tomllib
import uuid

TOOLS = pathlib.Path(__file__).resolve().parents[1]
# name | licence | script | its version and hash there | package URL | what it is for
LINKED = [
    ("openssl", "Apache-2.0", "openssl.sh",
     r"version=\S+\+(?P<version>\S+)\nsha256=(?P<hash>\w+)", "pkg:generic/openssl@%s",
     "TLS 1.3 between ranks, HTTPS; static, in libhvd.so and horovodrun"),
    ("curl", "curl", "curl.sh", r"version=\S+\+curl-(?P<version>\S+)\nsha256=(?P<hash>\w+)",
     "pkg:generic/curl@%s", "HTTPS requests of horovodrun; static"),
    ("libyaml", "MIT", "release/toolchain.sh",
     r"libyaml_(?P<version>[\d.]+)\.orig\S+ \\\n\s+(?P<hash>\w{64})", "pkg:generic/libyaml@%s",
     "files read by horovodrun; static"),
    ("jansson", "MIT", "release/toolchain.sh",
     r"jansson_(?P<version>[\d.]+)\.orig\S+ \\\n\s+(?P<hash>\w{64})", "pkg:generic/jansson@%s",
     "JSON in horovodrun; static"),
]


def linked():
    for name, licence, script, pattern, purl, purpose in LINKED:
        found = re.search(pattern, (TOOLS / script).read_text())
        if not found:
            sys.exit(f"sbom: tools/{script} does not say which {name} it builds")
        kind = {"name": licence} if licence == "curl" else {"id": licence}
        yield {"type": "library", "name": name, "version": found["version"],
               "bom-ref": purl % found["version"], "purl": purl % found["version"],
               "description": purpose, "scope": "required", "licenses": [{"license": kind}],
               "hashes": [{"alg": "SHA-256", "content": found["hash"]}]}


def main():
    tree, version = pathlib.Path(sys.argv[1]), sys.argv[2]
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    main_ref = f"pkg:pypi/horovod@{version}"
    components = list(linked())
    for requirement in project["dependencies"]:
        name = re.match(r"[\w.-]+", requirement)[0]
        components.append({"type": "library", "name": name, "bom-ref": f"pkg:pypi/{name}",
                           "purl": f"pkg:pypi/{name}", "scope": "required",
                           "description": "installed beside it by pip"})
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ",
                                       time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))),
            "component": {"type": "library", "name": project["name"], "version": version,
                          "bom-ref": main_ref, "purl": main_ref,
                          "description": project["description"],
                          "licenses": [{"license": {"id": "Apache-2.0"}}]}},
        "components": components,
        "dependencies": [{"ref": main_ref,
                          "dependsOn": [part["bom-ref"] for part in components]}],
    }
    text = json.dumps(bom, sort_keys=True)
    bom["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, text)}"
    print(json.dumps(bom, indent=2, sort_keys=True))


if __name__ == "__main__":
    main()
