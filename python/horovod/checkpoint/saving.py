# SPDX-License-Identifier: Apache-2.0
"""Saving: copy this rank's share, then write it while training goes on.

save() is called by all ranks. Rank 0 names a new folder; every rank copies its share to memory and
returns. A thread of its own, that yields to everything else on this machine, writes the share, and
then a note that it is on the disk. That of rank 0 waits for the notes of all ranks and writes the
manifest, with which the checkpoint is there; then old ones are removed. So a crash at any moment
leaves the newest complete one as it was. Ranks talk through the store only, which costs training
nothing: it must be one that all reach.
"""
import atexit
import contextlib
import json
import logging
import os
import secrets
import threading
import time
import zlib

from horovod import _core
from horovod.checkpoint import shards
from horovod.checkpoint.shards import About
from horovod.checkpoint.store import store_of
from horovod.checkpoint.tree import flatten
from horovod.common.objects import broadcast_object

_log = logging.getLogger("horovod")

MANIFEST = "manifest.json"
FORMAT, VERSION = "horovod.checkpoint", 1
LOOK_EVERY_S = 0.05
OTHERS_TIMEOUT_S = 600  # of rank 0 for the notes of others
EXIT_TIMEOUT_S = 120  # of a process that ends
LEAST_PRIORITY = 19

_current = None  # the Save of this process that was begun last
_inits = 0  # how often this process has joined a job


def place():
    """(rank, size); a process that has not joined a job is one of its own."""
    return (_core.rank(), _core.size()) if _core.is_initialized() else (0, 1)


def folder_name(step, token):
    return f"step-{step:012d}-{token}"


def part_name(rank, n_ranks):
    return f"rank-{rank:05d}-of-{n_ranks:05d}"


def manifest_text(manifest):
    """JSON that also has the checksum of what counts in it."""
    text = json.dumps(manifest, separators=(",", ":"))
    return f'{{"crc32":"{zlib.crc32(text.encode()):08x}","manifest":{text}}}\n'.encode()


class Save:
    """A checkpoint on its way. done(): has this rank's part ended? wait(): until it has."""

    def __init__(self, store, folder, step, keep, job):
        self.folder, self.step, self.job = folder, step, job
        self.error = None
        self._store, self._keep = store, keep
        self._is_over = threading.Event()
        self._is_given_up = False
        self._thread = None

    def done(self):
        return self._is_over.is_set()

    def wait(self, timeout=None):
        """Until the part of this rank, and on rank 0 the checkpoint, is on the disk.

        Raises what went wrong: OSError if it could not be written, TimeoutError.
        """
        if not self._is_over.wait(timeout):
            raise TimeoutError(f"{self.folder} is still being written after {timeout} s")
        if self.error is not None:
            raise self.error

    def give_up(self):
        """No more waiting for other ranks: they have left."""
        self._is_given_up = True

    def start(self, *args):
        self._thread = threading.Thread(target=self._run, args=args, daemon=True,
                                        name="horovod-checkpoint")
        self._thread.start()

    def _run(self, *args):
        with contextlib.suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        try:
            self._write(*args)
        except Exception as error:  # training goes on; wait() tells
            self.error = error
            _log.warning("checkpoint %s at %s is not complete: %s; training goes on, and the one "
                         "before stays", self.folder, self._store.path, error)
        finally:
            self._is_over.set()

    def _write(self, rank, n_ranks, tree, abouts, pieces, values):
        name = part_name(rank, n_ranks)
        file_name = name + ".safetensors"
        self._store.make(self.folder)
        with self._store.writing(self.folder, file_name) as file:
            part = shards.write(file, pieces, abouts, values)
        values.release()
        part["file"] = file_name
        with self._store.writing(self.folder, name + ".json") as file:
            file.write(json.dumps(part).encode())
        if rank == 0:
            self._complete(n_ranks, tree, abouts)
            try:
                self._remove_old()
            except Exception as error:
                _log.warning("checkpoint %s is complete, but older ones at %s cannot be removed: "
                             "%s", self.folder, self._store.path, error)

    def _complete(self, n_ranks, tree, abouts):
        parts = [self._part(rank, n_ranks) for rank in range(n_ranks)]
        shards.check(abouts, parts)
        manifest = {"format": FORMAT, "version": VERSION, "step": self.step, "time": time.time(),
                    "n_ranks": n_ranks, "tree": tree, "shards": parts,
                    "tensors": {name: [about.dtype, list(about.shape)]
                                for name, about in abouts.items()}}
        with self._store.writing(self.folder, MANIFEST) as file:
            file.write(manifest_text(manifest))

    def _part(self, rank, n_ranks):
        name = part_name(rank, n_ranks) + ".json"
        deadline = time.monotonic() + OTHERS_TIMEOUT_S
        while name not in self._store.files(self.folder):
            if self._is_given_up or time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {rank} has not written its part; "
                    + ("it has left the job" if self._is_given_up else
                       f"not within {OTHERS_TIMEOUT_S} s. Do all ranks reach the same "
                       f"{self._store.path}?"))
            time.sleep(LOOK_EVERY_S)
        with self._store.reading(self.folder, name) as file:
            return json.loads(file.read())

    def _remove_old(self):
        """Those before the last `keep`, and what never became complete."""
        others = sorted(name for name in self._store.folders()
                        if name.startswith("step-") and name <= self.folder)
        complete = [name for name in others if MANIFEST in self._store.files(name)]
        kept = set(complete[-self._keep:]) | {self.folder}
        for name in others:
            if name not in kept:
                self._store.remove_file(name, MANIFEST)  # first: half of it is none
                self._store.remove(name)


def save(path, state, step, framework, keep=3, wait=False):
    """What horovod.checkpoint.save() does, with tensors of a framework."""
    global _current
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint must stay")
    rank, n_ranks = place()
    tree, tensors = flatten(state, framework)
    abouts = {name: About(*framework.describe(tensor)) for name, tensor in tensors.items()}
    token = (int(step), f"{time.time_ns():016x}{secrets.token_hex(2)}")
    step, token = broadcast_object(token, 0, "horovod.checkpoint") if n_ranks > 1 else token
    _finish_previous()
    store = store_of(path)
    pieces = shards.share(abouts, rank, n_ranks)
    values = memoryview(bytearray(shards.n_bytes_of(pieces, abouts)))
    at = 0
    for piece in pieces:
        item = shards.ITEM_BYTES[abouts[piece.name].dtype]
        end = at + (piece.end - piece.begin) * item
        framework.copy(tensors[piece.name], piece.begin * item, piece.end * item, values[at:end])
        at = end
    _current = Save(store, folder_name(step, token), step, keep, _inits)
    _current.start(rank, n_ranks, tree, abouts, pieces, values)
    if wait:
        _current.wait()
    return _current


def count_inits():
    """After every init(), so that ranks that have left are not waited for."""
    global _inits
    _inits += 1


def _finish_previous():
    """One checkpoint at a time: memory for two would be too much."""
    if _current is None:
        return
    if _current.job != _inits:
        _current.give_up()
    with contextlib.suppress(Exception):  # it has been told
        _current.wait(OTHERS_TIMEOUT_S)


def _finish_at_exit():
    if _current is not None and not _current.done():
        with contextlib.suppress(Exception):
            _current.wait(EXIT_TIMEOUT_S)
        if not _current.done():
            _log.warning("the process ends before checkpoint %s is complete", _current.folder)


atexit.register(_finish_at_exit)
