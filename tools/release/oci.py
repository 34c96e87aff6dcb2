#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs a chart as an OCI artefact, in the form of Helm: oci.py CHART.YAML PACKAGE.tgz OUT.tar

The archive is an image layout: an index, a manifest, the metadata as its configuration, the package
and, if it lies beside, its provenance as layers. Equal inputs give equal bytes.
"""
import hashlib
import io
import json
import os
import pathlib
import sys
import tarfile
import time

import yaml

HELM = "application/vnd.cncf.helm."
LAYERS = [("", HELM + "chart.content.v1.tar+gzip"), (".prov", HELM + "chart.provenance.v1.prov")]


class Layout:
    def __init__(self, path):
        self.tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)

    def add(self, name, data):
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime = len(data), int(os.environ["SOURCE_DATE_EPOCH"])
        self.tar.addfile(entry, io.BytesIO(data))

    def blob(self, media_type, data):
        """-> its descriptor"""
        digest = hashlib.sha256(data).hexdigest()
        self.add("blobs/sha256/" + digest, data)
        return {"mediaType": media_type, "digest": "sha256:" + digest, "size": len(data)}


def encoded(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def main():
    chart = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
    package, out = sys.argv[2:]
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ",
                            time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"])))
    layout = Layout(out)
    layout.add("oci-layout", encoded({"imageLayoutVersion": "1.0.0"}))
    config = layout.blob(HELM + "config.v1+json", encoded(chart))
    layers = []
    for suffix, media_type in LAYERS:
        path = pathlib.Path(package + suffix)
        if path.exists():
            layers.append(layout.blob(media_type, path.read_bytes()))
            layers[-1]["annotations"] = {"org.opencontainers.image.title": path.name}
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = layout.blob(kind, encoded({
        "schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers,
        "annotations": {"org.opencontainers.image.title": chart["name"],
                        "org.opencontainers.image.version": chart["version"],
                        "org.opencontainers.image.description": chart["description"],
                        "org.opencontainers.image.created": created}}))
    manifest["annotations"] = {"org.opencontainers.image.ref.name": chart["version"]}
    layout.add("index.json", encoded({"schemaVersion": 2, "manifests": [manifest]}))
    layout.tar.close()


if __name__ == "__main__":
    main()
