#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lays a PyTorch over the one of this interpreter that runs on the simulated GPU of tests/gpu.

Usage: overlay-torch.py FOLDER LIBRARY    for PYTHONPATH; does nothing if FOLDER is newer than both

All files are links to the installed ones, as install-torch.py has made them, but for the stand-in
behind PyTorch's CUDA libraries: its functions are the simulation's. Those that the simulation lacks
fail, and tell their name once. Needs gcc and binutils.
"""
import pathlib
import shutil
import subprocess
import sys
import sysconfig

STAND_IN = "libnogpu.so"
NOT_SUPPORTED = 801


def functions_of(library):
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True,
                           capture_output=True, text=True).stdout.splitlines()
    return {line.split()[2] for line in lines if line.split()[1] == "T"}


def stub(name):
    if name.endswith(("String", "ErrorName")):
        return f'const char *{name}(void) {{ return "not simulated"; }}\n'
    return (f"int {name}(void) {{ static int told; if (!told++) "
            f'fprintf(stderr, "gpusim: {name} is not simulated\\n"); return {NOT_SUPPORTED}; }}\n')


def make_stand_in(installed, library, path):
    missing = functions_of(installed) - functions_of(library)
    source = "#include <stdio.h>\n" + "".join(stub(name) for name in sorted(missing))
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", "-x", "c", "-", "-x", "none",
                    f"-Wl,-soname,{STAND_IN}", "-Wl,--no-as-needed", library,
                    f"-Wl,-rpath,{library.parent}", "-o", path],
                   input=source, text=True, check=True)


def main():
    folder, library = (pathlib.Path(name).resolve() for name in sys.argv[1:])
    torch = pathlib.Path(sysconfig.get_path("purelib")) / "torch"
    stand_in = folder / "torch" / "lib" / STAND_IN
    sources = [torch / "version.py", library, pathlib.Path(__file__)]
    if stand_in.exists() and all(stand_in.stat().st_mtime > file.stat().st_mtime
                                 for file in sources):
        return
    if not (torch / "lib" / STAND_IN).exists():
        sys.exit(f"{torch} was not made by tools/install-torch.py: it has no {STAND_IN}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run(["cp", "-rs", torch, folder / "torch"], check=True)
    stand_in.unlink()
    make_stand_in(torch / "lib" / STAND_IN, library, stand_in)


if __name__ == "__main__":
    main()
