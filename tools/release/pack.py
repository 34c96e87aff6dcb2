#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs a wheel again, in the same bytes whoever does it: pack.py WHEEL FOLDER

Members are sorted (the metadata last, as installers like it), have the date of SOURCE_DATE_EPOCH
and the rights 0644 or 0755, and are compressed alike.
"""
import os
import pathlib
import sys
import time
import zipfile


def order(member):
    return (".dist-info/" in member.filename, member.filename)


def main():
    source, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    # A zip file knows no date before 1980, and no odd seconds.
    date = time.gmtime(max(int(os.environ["SOURCE_DATE_EPOCH"]), 315532800) // 2 * 2)[:6]
    with zipfile.ZipFile(source) as old, \
            zipfile.ZipFile(folder / source.name, "w", compresslevel=9) as new:
        for member in sorted(old.infolist(), key=order):
            if member.is_dir():
                continue
            entry = zipfile.ZipInfo(member.filename, date)
            executable = member.external_attr >> 16 & 0o111
            entry.external_attr = (0o100755 if executable else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            new.writestr(entry, old.read(member))


if __name__ == "__main__":
    main()
