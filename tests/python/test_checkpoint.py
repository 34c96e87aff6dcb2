# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: shares, other numbers of ranks, crashes at any moment, damage, full disks."""
import json
import os
import pathlib
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from ranks import run_ranks

from horovod import checkpoint
from horovod.checkpoint import saving, shards
from horovod.checkpoint import store as stores
from horovod.checkpoint.shards import About
from horovod.common import basics as hvd

SEED = int(os.environ.get("HVD_TEST_SEED", "1"))
N_MOMENTS = 200


def state_at(step, n=3000):
    """A state that says which step it is of, in every part."""
    return {"weights": [np.full((n, 100), step, dtype=np.float32), np.arange(7) + step],
            "step": step, 3: (None, True, b"x", 1.5, "t"), "0d": np.array(step, dtype=np.int16)}


def assert_state(state, step, n=3000):
    assert np.array_equal(state["weights"][0], np.full((n, 100), step, dtype=np.float32))
    assert np.array_equal(state["weights"][1], np.arange(7) + step)
    assert state["step"] == step and state[3] == (None, True, b"x", 1.5, "t")
    assert state["0d"].shape == () and state["0d"] == step and state["0d"].dtype == np.int16


def test_round_trip(tmp_path):
    assert checkpoint.load(tmp_path / "none") is None
    for step in range(1, 6):
        checkpoint.save(tmp_path, state_at(step), step, keep=2, wait=True)
    found = checkpoint.load(tmp_path)
    assert found.step == 5
    assert_state(found.state, 5)
    assert_state(checkpoint.load(tmp_path, step=4).state, 4)
    assert checkpoint.load(tmp_path, step=3) is None
    assert len(list(tmp_path.iterdir())) == 2


def test_shares_are_even_and_whole():
    random.seed(SEED)
    for _ in range(300):
        abouts = {f"t{i}": About(random.choice(["F32", "I8", "F64"]), (random.choice(
            [0, 1, 3, 1000, shards.SPLIT_FROM_BYTES, 3 * shards.SPLIT_FROM_BYTES + 1]),))
            for i in range(random.randrange(6))}
        n_ranks = random.randrange(1, 7)
        total = sum(about.n_bytes() for about in abouts.values())
        parts = []
        for rank in range(n_ranks):
            pieces = shards.share(abouts, rank, n_ranks)
            n_bytes = shards.n_bytes_of(pieces, abouts)
            assert abs(n_bytes - total / n_ranks) < 6 * shards.SPLIT_FROM_BYTES
            parts.append({"file": "f", "bytes": 1 << 40, "pieces": [
                {"tensor": p.name, "begin": p.begin, "end": p.end, "offset": 0} for p in pieces]})
        shards.check(abouts, parts)
        whole = next((part for part in parts if part["pieces"]), None)
        if whole and any(p["begin"] < p["end"] for p in whole["pieces"]):
            whole["pieces"] = [p for p in whole["pieces"] if p["begin"] == p["end"]]
            with pytest.raises(ValueError, match="not complete"):
                shards.check(abouts, parts)


def test_files_are_safetensors(tmp_path):
    """As its specification has them: others can read the tensors without this library."""
    checkpoint.save(tmp_path, {"a": np.arange(5, dtype=np.int16)}, 1, wait=True)
    [file] = tmp_path.glob("step-*/*.safetensors")
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + n])
    begin, end = header["a"]["data_offsets"]
    assert header["a"]["dtype"] == "I16" and header["a"]["shape"] == [5]
    assert data[8 + n + begin:8 + n + end] == np.arange(5, dtype=np.int16).tobytes()
    assert len(data) == 8 + n + end


def test_what_it_does_not_take(tmp_path):
    with pytest.raises(TypeError, match="cannot hold inner/0, a .*Path.*state_dict"):
        checkpoint.save(tmp_path, {"inner": [pathlib.Path("x")]}, 1)
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(tmp_path, {}, 1, keep=0)


# --- Damage, and malice ---------------------------------------------------------------------------


def damage(path, rng):
    """One file of a checkpoint is cut, filled with zeros from somewhere, changed, or gone."""
    file = rng.choice(sorted(path.iterdir()))
    if file.suffix == ".json" and file.name != saving.MANIFEST:
        file = path / saving.MANIFEST  # notes of ranks are not needed any more
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    kind = rng.choice(["cut", "zeros", "flip", "gone"])
    if kind == "gone":
        file.unlink()
        return
    if kind == "cut":
        del data[at:]
    elif kind == "zeros":
        data[at:] = bytes(len(data) - at)
    else:
        data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def test_damaged_ones_are_passed_over(tmp_path):
    rng = random.Random(SEED)
    for _ in range(100):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            for step in (1, 2):
                checkpoint.save(folder, state_at(step, 10), step, wait=True)
            newest = max(pathlib.Path(folder).iterdir())
            before = {file.name: file.read_bytes() for file in newest.iterdir()}
            damage(newest, rng)
            found = checkpoint.load(folder)
            if found.step == 2:  # the bytes that were hit do not count: padding, or zeros already
                assert_state(found.state, 2, 10)
                after = {file.name: file.read_bytes() for file in newest.iterdir()}
                header = 8 + int.from_bytes(
                    before["rank-00000-of-00001.safetensors"][:8], "little")
                assert all(before[name][header:] == after[name][header:] for name in before
                           if name.endswith("safetensors"))
            else:
                assert_state(found.state, 1, 10)


class Evil:
    def __reduce__(self):
        return os._exit, (66,)


def test_a_pickle_is_not_opened(tmp_path):
    checkpoint.save(tmp_path, state_at(1, 10), 1, wait=True)
    checkpoint.save(tmp_path, state_at(2, 10), 2, wait=True)
    for file in max(tmp_path.iterdir()).iterdir():
        file.write_bytes(pickle.dumps(Evil()))
    assert checkpoint.load(tmp_path).step == 1


@pytest.mark.parametrize("change", [
    lambda m: m["tensors"].update(x=["F32", [1 << 40]]),  # memory that no file has
    lambda m: m["tensors"].update(x=["F32", [-1, -4]]),
    lambda m: m["tensors"].update(x=["PICKLE", [1]]),
    lambda m: m["shards"][0].update(file="../../etc/passwd"),
    lambda m: m["shards"][0]["pieces"][0].update(offset=-8),
    lambda m: m["shards"][0]["pieces"][0].update(begin=-8),
    lambda m: m.update(tree={"object": "os.system"}),
    lambda m: m.update(version=9),
])
def test_a_manifest_is_not_believed(tmp_path, change):
    """Whoever can write there can write a checksum that fits."""
    checkpoint.save(tmp_path, state_at(1, 10), 1, wait=True)
    checkpoint.save(tmp_path, state_at(2, 10), 2, wait=True)
    path = max(tmp_path.iterdir()) / saving.MANIFEST
    manifest = json.loads(path.read_text())["manifest"]
    change(manifest)
    path.write_bytes(saving.manifest_text(manifest))
    assert checkpoint.load(tmp_path).step == 1


# --- Crashes --------------------------------------------------------------------------------------


def keep_saving(folder, first):
    step = first
    while True:
        checkpoint.save(folder, state_at(step), step, keep=2, wait=True)
        pathlib.Path(folder, "said.new").write_text(str(step))
        os.rename(pathlib.Path(folder, "said.new"), pathlib.Path(folder, "said"))
        step += 1


def test_killed_at_any_moment(tmp_path):
    """Whatever was told to be on the disk is there afterwards, and what loads is whole."""
    rng = random.Random(SEED)
    step, n_unfinished = 1, 0
    begin = time.monotonic()
    checkpoint.save(tmp_path / "trial", state_at(0), 0, wait=True)
    one_s = time.monotonic() - begin
    for _ in range(N_MOMENTS):
        pid = os.fork()
        if pid == 0:
            keep_saving(tmp_path, step)
        time.sleep(rng.uniform(0, 3 * one_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = checkpoint.load(tmp_path)
        said = tmp_path / "said"
        if found is not None:
            assert_state(found.state, found.step)
        if said.exists():
            assert found is not None and found.step >= int(said.read_text())
        complete = [folder for folder in tmp_path.glob("step-*") if (folder / "manifest.json")
                    .exists()]
        n_unfinished += len(complete) < len(list(tmp_path.glob("step-*")))
        step = found.step + 1 if found is not None else 1
    assert step > N_MOMENTS / 20 and n_unfinished > N_MOMENTS / 20, (step, n_unfinished)


class PowerLost(Exception):
    pass


class LosingStore(stores._Directory):
    """Loses power at the n-th operation: of files not brought to the disk any part may be left."""

    def __init__(self, path, n, rng):
        super().__init__(path)
        self.left, self.rng = n, rng

    def _tick(self):
        self.left -= 1
        if self.left < 0:
            raise PowerLost

    def writing(self, folder, name):
        return _LosingFile(self, folder, name)

    def make(self, folder):
        self._tick()
        super().make(folder)

    def remove_file(self, folder, name):
        self._tick()
        super().remove_file(folder, name)

    def remove(self, folder):
        for name in os.listdir(self._full(folder)):
            self._tick()
            os.unlink(self._full(folder, name))
        os.rmdir(self._full(folder))


class _LosingFile:
    """Before fsync: any beginning of what was written, or zeros, under the name of the draft."""

    def __init__(self, store, folder, name):
        self.store, self.path = store, store._full(folder, name)
        self.data = bytearray()

    def __enter__(self):
        return self

    def write(self, data):
        self.data += data
        try:
            self.store._tick()
        except PowerLost:
            kept = self.store.rng.randrange(len(self.data) + 1)
            torn = self.data[:kept] + (bytes(len(self.data) - kept)
                                       if self.store.rng.random() < 0.5 else b"")
            pathlib.Path(self.path + stores.DRAFT).write_bytes(torn)
            raise

    def __exit__(self, kind, error, trace):
        if kind is not None:
            return
        pathlib.Path(self.path + stores.DRAFT).write_bytes(self.data)
        self.store._tick()
        os.rename(self.path + stores.DRAFT, self.path)
        self.store._tick()


def test_power_lost_at_any_operation(tmp_path, monkeypatch):
    rng = random.Random(SEED)
    step, losses = 0, 0
    for n in list(range(60)) * 4:
        lost = LosingStore(str(tmp_path), n % 30 + rng.randrange(2), rng)
        monkeypatch.setattr(saving, "store_of", lambda path, lost=lost: lost)
        done, said = step, []
        for attempt in range(4):
            saved = checkpoint.save(tmp_path, state_at(step + 1, 50), step + 1, keep=2)
            try:
                saved.wait()
            except PowerLost:
                losses += 1
                break
            step += 1
            said.append(step)
        found = checkpoint.load(tmp_path)
        assert (found.step if found else 0) >= (said[-1] if said else done)
        if found:
            assert_state(found.state, found.step, 50)
            step = found.step
    assert losses >= 200 and step > 50


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_disk_full(tmp_path):
    """Told, not fatal; the one before loads; with space again the next is complete."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3M", "none", disk], check=True)
    try:
        checkpoint.save(disk, state_at(1), 1, wait=True)
        rng = random.Random(SEED)
        for _ in range(20):
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(rng.randrange(1 << 20, 3 << 19)))
            with pytest.raises(OSError, match="No space left"):
                checkpoint.save(disk, state_at(2), 2, wait=True)
            assert_state(checkpoint.load(disk).state, 1)
            ballast.unlink()
        checkpoint.save(disk, state_at(3), 3, keep=1, wait=True)
        assert_state(checkpoint.load(disk).state, 3)
        assert len(list(disk.iterdir())) == 1  # also what never became complete is gone
    finally:
        subprocess.run(["umount", disk], check=True)


# --- Several ranks --------------------------------------------------------------------------------


def save_on_ranks(folder, step):
    hvd.init()
    checkpoint.save(folder, state_at(step, 30000), step, wait=hvd.rank() != 0).wait()


def load_on_ranks(folder):
    hvd.init()
    found = checkpoint.load(folder)
    assert_state(found.state, found.step, 30000)
    return found.step


def test_other_numbers_of_ranks(tmp_path):
    for n_save, n_load in ((3, 2), (1, 3), (2, 1)):
        run_ranks(n_save, "test_checkpoint", "save_on_ranks", tmp_path, n_save)
        [folder] = tmp_path.glob(f"step-{n_save:012d}-*")
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        assert len(sizes) == n_save and max(sizes) < 1.1 * min(sizes) + 4096
        run_ranks(n_load, "test_checkpoint", "load_on_ranks", tmp_path)
        for file in folder.iterdir():
            file.unlink()


def load_where_one_cannot(folder, newest):
    hvd.init()
    if hvd.rank() == 1:  # its disk has another opinion
        real = stores._Directory.reading

        def reading(self, folder, name):
            if folder.startswith(newest):
                raise OSError(5, "Input/output error")
            return real(self, folder, name)

        stores._Directory.reading = reading
    return checkpoint.load(folder).step


def test_all_ranks_load_the_same(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, state_at(step, 10), step, wait=True)
    assert run_ranks(2, "test_checkpoint", "load_where_one_cannot", tmp_path,
                     "step-000000000002") == [1, 1]


def test_fsspec(tmp_path):
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path}"
    for step in range(1, 5):
        checkpoint.save(url, state_at(step), step, keep=2, wait=True)
    found = checkpoint.load(url)
    assert_state(found.state, 4)
    assert checkpoint.load(url, step=2) is None
    assert checkpoint.load(f"file://{tmp_path}/other") is None


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
