# SPDX-License-Identifier: Apache-2.0
"""Stores: which class a path gets, where things are, and that what is written can be read."""
import os
import pickle

import pyarrow as pa
import pyarrow.fs
import pytest

from horovod.spark.common.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store
from horovod.spark.data import open_filesystem


def test_paths(tmp_path):
    store = Store.create(str(tmp_path))
    assert type(store) is FilesystemStore
    prefix = f"file://{tmp_path}"
    assert store.prefix_path == prefix
    assert store.get_train_data_path() == f"{prefix}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{prefix}/intermediate_val_data.3"
    assert store.get_test_data_path() == f"{prefix}/intermediate_test_data"
    assert store.get_checkpoint_path("r") == f"{prefix}/runs/r/checkpoint"
    assert store.get_logs_path("r") == f"{prefix}/runs/r/logs"
    given = LocalStore(str(tmp_path), train_path="file:///t", runs_path="file:///r",
                       save_runs=False)
    assert given.get_train_data_path() == "file:///t" and not given.saving_runs()
    assert given.get_run_path("1") == "file:///r/1"


def test_paths_in_other_spellings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a", "a/", f"{tmp_path}/a/", f"file:{tmp_path}/a", f"file://{tmp_path}/a/"):
        assert Store.create(path).get_runs_path() == f"file://{tmp_path}/a/runs"
    assert Store.create("s3://bucket/a/").get_runs_path() == "s3://bucket/a/runs"
    given = Store.create("a", train_path="/t", val_path="file:/v/", runs_path="r")
    assert given.get_train_data_path(2) == "file:///t.2"
    assert given.get_val_data_path() == "file:///v"
    assert given.get_runs_path() == f"file://{tmp_path}/r"


@pytest.mark.parametrize("url, host, port, full", [
    ("hdfs://namenode:8020/a/b", "namenode", 8020, "hdfs://namenode:8020/a/b"),
    ("hdfs://namenode/a", "namenode", 0, "hdfs://namenode/a"),
    ("hdfs:///a/", "default", 0, "hdfs:///a")])
def test_hdfs_urls(url, host, port, full, monkeypatch):
    """And with what a connection is made, for the store itself and for who reads from it."""
    made = []
    monkeypatch.setattr(pa.fs, "HadoopFileSystem",
                        lambda *args, **given: made.append((args, given)))
    store = Store.create(url, user="me", extra_conf={"k": "v"}, train_path="/t")
    assert isinstance(store, HDFSStore)
    assert store.prefix_path == full
    assert store.get_runs_path() == f"{full}/runs"
    assert store._open(store.get_run_path("1"))[1].endswith("/runs/1")
    _, inner = open_filesystem(store.get_train_data_path(), store.storage_options)
    assert inner == "/t"
    assert made == [((host, port), {"user": "me", "extra_conf": {"k": "v"}})] * 2


def test_hdfs_hosts_beside_the_path():
    assert HDFSStore("/a", "namenode", 9000).prefix_path == "hdfs://namenode:9000/a"


@pytest.mark.parametrize("url", ["s3://bucket/a", "hdfs://", "hdfs://host", ""])
def test_what_is_not_hdfs(url):
    with pytest.raises(ValueError):
        HDFSStore(url)


@pytest.mark.parametrize("path", ["/dbfs/a/b", "dbfs:/a/b", "file:/dbfs/a/b", "file:///dbfs/a/b"])
def test_dbfs(path, monkeypatch):
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17")
    store = Store.create(path)
    assert isinstance(store, DBFSLocalStore)
    assert store.prefix_path == "file:///dbfs/a/b"
    assert store.get_full_path(path + "/c") == "file:///dbfs/a/b/c"
    assert store.get_checkpoint_filename() == "checkpoint.tf"


@pytest.mark.parametrize("make", [lambda path: Store.create(str(path)),
                                  lambda path: Store.create(f"memory://{path}")])
def test_files(tmp_path, make):
    pytest.importorskip("fsspec")
    store = pickle.loads(pickle.dumps(make(tmp_path)))
    path = store.get_checkpoint_path("run")
    assert not store.exists(path)
    store.write(path, b"first")
    store.write_text(path, "second")
    assert store.exists(path) and store.read(path) == b"second"
    assert not store.is_parquet_dataset(store.get_train_data_path())
    store.write(store.get_train_data_path() + "/a.parquet", b"")
    assert store.is_parquet_dataset(store.get_train_data_path())
    remote = store.to_remote("run")
    with remote.get_local_output_dir() as folder:
        os.makedirs(f"{folder}/logs")
        with open(f"{folder}/logs/events", "w") as file:
            file.write("seen")
        remote.sync(folder)
    assert not os.path.exists(folder)
    assert store.read(store.get_logs_path("run") + "/events") == b"seen"
    store.write(store.get_run_path("run") + "/1.ckpt", b"")
    assert [os.path.basename(name) for name in store.get_checkpoints("run")] == ["1.ckpt"]
    store.delete(store.get_run_path("run"))
    assert not store.exists(path)
