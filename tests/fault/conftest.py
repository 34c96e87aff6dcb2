# SPDX-License-Identifier: Apache-2.0
"""After every test: no process, file, segment or socket is left (tests/ranks/scene.h)."""
import ctypes
import os

import pytest

LEFT_MS = 6000

scene = ctypes.CDLL(os.environ["HVD_SCENE"])  # <build>/tests/libscene.so
scene.scene_make.restype = ctypes.c_bool
scene.scene_look.restype = ctypes.c_void_p
scene.scene_left.restype = ctypes.c_char_p
scene.scene_left.argtypes = [ctypes.c_void_p, ctypes.c_int]
scene.scene_free.argtypes = [ctypes.c_void_p]


def pytest_sessionstart():
    if not scene.scene_make():
        pytest.exit("needs root, or the right to make namespaces: nothing was tested", 1)


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = scene.scene_look()
    yield
    left = scene.scene_left(before, LEFT_MS).decode(errors="replace")
    scene.scene_free(before)
    assert left == "", "left behind"
