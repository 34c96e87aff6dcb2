#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs PyTorch into this interpreter's environment without the gigabytes of its GPU parts.

Usage: install-torch.py [VERSION]     does nothing if that version is there

PyPI's wheel for Linux names CUDA libraries that come as packages of their own. Here they are left
out, and small libraries stand in for them: every CUDA function they would have had returns "no
device". For tests on the CPU only; who has a GPU installs PyTorch as its own page says.
Needs gcc and binutils.
"""
import pathlib
import re
import subprocess
import sys
import sysconfig

VERSION = "2.15.0"
LIGHT_DEPENDENCIES = ["filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec",
                      "setuptools>=77"]
FIRST_WITH_NUMPY_2 = (2, 3)
GPU_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
GPU_SYMBOL = re.compile(r"_*(cu[A-Z]|cuda|cublas|cudnn|cufft|cuFile|cupti|cusparse|cusolver|nccl|"
                        r"nvrtc|nvtx|nvshmem|nvml|curand|nvJitLink)")
STAND_IN = "libnogpu.so"


def installed_version():
    code = "import torch; print(torch.__version__.partition('+')[0])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


def numpy_for(version):
    numbers = tuple(int(number) for number in version.split(".")[:2])
    return "numpy" if numbers >= FIRST_WITH_NUMPY_2 else "numpy<2"


def pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check",
                    *arguments], check=True)


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_libraries(folder):
    """(names of GPU libraries needed, GPU functions that nobody here defines)"""
    libraries = [file for file in folder.glob("*.so*") if file.stat().st_size > 16000]
    needed, undefined, defined = set(), set(), set()
    for file in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.+?)\]", output_of("readelf", "-d", file)))
        for line in output_of("nm", "-D", file).splitlines():
            kind, name = line.split()[-2:]
            (undefined if kind in "Uw" else defined).add(name.partition("@")[0])
    present = {file.name for file in libraries}
    missing = sorted(name for name in needed - present if GPU_LIBRARY.match(name))
    return missing, sorted(name for name in undefined - defined if GPU_SYMBOL.match(name))


def make_library(folder, name, source, *options):
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-nostdlib", "-x", "c", "-",
                    f"-Wl,-soname,{name}", "-o", folder / name, *options],
                   input=source, text=True, check=True)


def make_stand_ins(folder):
    missing, functions = read_libraries(folder)
    # All functions in one library: glibc refuses unversioned ones under a versioned name.
    make_library(folder, STAND_IN, "".join(f"int {name}(void){{return 100;}}\n"
                                           for name in functions))
    for name in missing:
        make_library(folder, name, "", f"-L{folder}", "-Wl,--no-as-needed", "-lnogpu",
                     "-Wl,-rpath,$ORIGIN")


def main():
    version = sys.argv[1] if len(sys.argv) > 1 else VERSION
    if installed_version() == version:
        return
    print(f"setup: installing PyTorch {version}, its CPU part; some minutes")
    pip(*LIGHT_DEPENDENCIES, numpy_for(version))
    pip("--no-deps", f"torch=={version}")
    make_stand_ins(pathlib.Path(sysconfig.get_path("purelib")) / "torch" / "lib")
    if installed_version() != version:
        sys.exit("setup: PyTorch was installed but cannot be imported; try: "
                 f"{sys.executable} -c 'import torch'")


if __name__ == "__main__":
    main()
