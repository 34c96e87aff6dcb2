# SPDX-License-Identifier: Apache-2.0
"""Loading: the newest checkpoint that is complete and undamaged, on any number of ranks.

Rank 0 lists the checkpoints; each rank reads all of one, and if any rank cannot, all take the one
before. Nothing that is read is trusted: a manifest is JSON, checked before memory is taken, and
tensors are raw bytes whose checksums must fit. No code is run, nothing is unpickled.
"""
import json
import logging
import zlib
from typing import Any, NamedTuple

from horovod.checkpoint import shards
from horovod.checkpoint.saving import FORMAT, MANIFEST, VERSION, place
from horovod.checkpoint.shards import About
from horovod.checkpoint.store import store_of
from horovod.checkpoint.tree import build
from horovod.common.objects import allgather_object, broadcast_object

_log = logging.getLogger("horovod")

_PREFIX = b'{"crc32":"'
_MIDDLE = b'","manifest":'
_SUFFIX = b"}\n"
_SUM_DIGITS = 8
# What reading something that is damaged, or made to harm, can raise.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, EOFError,
           MemoryError)


class Checkpoint(NamedTuple):
    """What load() returns."""

    step: int
    state: Any


def _parse_manifest(data):
    begin = len(_PREFIX) + _SUM_DIGITS + len(_MIDDLE)
    text = data[begin:-len(_SUFFIX)]
    digits = data[len(_PREFIX):len(_PREFIX) + _SUM_DIGITS]
    if data != _PREFIX + digits + _MIDDLE + text + _SUFFIX or int(digits, 16) != zlib.crc32(text):
        raise ValueError("its manifest is damaged")
    manifest = json.loads(text)
    if manifest["format"] != FORMAT or manifest["version"] != VERSION:
        raise ValueError(f"it was written in version {manifest['version']} of the format; this is "
                         f"version {VERSION}")
    return manifest


def _read(store, folder, framework):
    with store.reading(folder, MANIFEST) as file:
        manifest = _parse_manifest(file.read())
    abouts = {name: About(dtype, tuple(shape))
              for name, (dtype, shape) in manifest["tensors"].items()}
    shards.check(abouts, manifest["shards"])
    for part in manifest["shards"]:
        if "/" in part["file"] or store.size(folder, part["file"]) != part["bytes"]:
            raise ValueError(f"{part['file']} does not have the size that the manifest tells")
    tensors, memories = {}, {}
    for name, about in abouts.items():
        tensors[name], memories[name] = framework.make(about.dtype, about.shape)
    for part in manifest["shards"]:
        with store.reading(folder, part["file"]) as file:
            for piece in part["pieces"]:
                item = shards.ITEM_BYTES[abouts[piece["tensor"]].dtype]
                shards.read_piece(file, piece, memories[piece["tensor"]][
                    piece["begin"] * item:piece["end"] * item])
    return Checkpoint(manifest["step"], build(manifest["tree"], tensors))


def _candidates(store, step):
    """Folders that may have a checkpoint, newest first."""
    found = []
    for name in sorted(store.folders(), reverse=True):
        words = name.split("-")
        is_one = len(words) == 3 and words[0] == "step" and words[1].isdigit()
        if is_one and (step is None or int(words[1]) == step) and MANIFEST in store.files(name):
            found.append(name)
    return found


def read(path, framework, step=None):
    """The newest checkpoint, or that of a step, on all ranks; None if there is none."""
    rank, n_ranks = place()
    store = store_of(path)
    folders = _candidates(store, step) if rank == 0 else None
    if n_ranks > 1:
        folders = broadcast_object(folders, 0, "horovod.checkpoint.folders")
    for folder in folders:
        found, problem = None, None
        try:
            found = _read(store, folder, framework)
        except _DAMAGE as error:
            problem = f"{type(error).__name__}: {error}" if not str(error) else str(error)
        problems = allgather_object(problem, "horovod.checkpoint.read") if n_ranks > 1 \
            else [problem]
        if not any(problems):
            return found
        if rank == 0:
            told = next(filter(None, problems))
            _log.warning("checkpoint %s at %s cannot be used: %s; trying the one before", folder,
                         store.path, told)
    return None


def load(path, framework, state=None, step=None):
    """What horovod.checkpoint.load() does, with tensors of a framework."""
    found = read(path, framework, step)
    if found is None or state is None:
        return found
    return Checkpoint(found.step, _put(state, found.state, "", framework))


def _put(target, saved, path, framework):
    """Puts what was saved into the objects of target; values come back as they were saved."""
    if framework.state_of(target) is not None:
        framework.restore(target, saved)
        return target
    if isinstance(target, dict) and isinstance(saved, dict):
        missing = [key for key in target if key not in saved]
        if missing:
            raise KeyError(f"the checkpoint has no {path}{missing[0]}; it has "
                           + ", ".join(map(str, saved)))
        return {**saved, **{key: _put(value, saved[key], f"{path}{key}/", framework)
                            for key, value in target.items()}}
    if isinstance(target, (list, tuple)) and isinstance(saved, (list, tuple)) \
            and len(target) == len(saved):
        return type(saved)(_put(*pair, f"{path}{i}/", framework)
                           for i, pair in enumerate(zip(target, saved)))
    return saved
