# SPDX-License-Identifier: Apache-2.0
"""Where estimators keep prepared data, checkpoints and logs.

    <prefix>/intermediate_train_data[.<n>]      and _val_data, _test_data: Parquet
    <prefix>/runs/<run id>/checkpoint           and logs/

A store works on any file system pyarrow or fsspec know by its URL; the classes differ in how they
read their prefix. A store can be pickled: it goes to the ranks as it is.
"""
import contextlib
import os
import posixpath
import re
import shutil
import tempfile
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import pyarrow.fs

from horovod.spark.data import open_filesystem


class RemoteStore(NamedTuple):
    """What a rank needs to know of a store, for one run."""
    train_data_path: Optional[str]
    val_data_path: Optional[str]
    test_data_path: Optional[str]
    saving_runs: bool
    runs_path: str
    run_path: str
    checkpoint_path: str
    logs_path: str
    checkpoint_filename: str
    logs_subdir: str
    get_local_output_dir: Callable[[], Any]
    sync: Callable[[str], None]


class Store:
    """Use Store.create(prefix): the right class for a path.

    A store of one's own is a subclass that says where things are, as paths or URLs; what is done
    with them follows from that, and may be overridden.
    """

    CHECKPOINT_FILENAME = "checkpoint"
    storage_options: Dict[str, Any] = {}  # for pyarrow or fsspec

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> "FilesystemStore":
        if HDFSStore.matches(prefix_path):
            return HDFSStore(prefix_path, *args, **kwargs)
        if "DATABRICKS_RUNTIME_VERSION" in os.environ and DBFSLocalStore.matches(prefix_path):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)

    # --- Where things are ------------------------------------------------------------------------

    def get_train_data_path(self, idx: Optional[int] = None) -> str:
        raise self._missing("get_train_data_path")

    def get_val_data_path(self, idx: Optional[int] = None) -> str:
        raise self._missing("get_val_data_path")

    def get_test_data_path(self, idx: Optional[int] = None) -> str:
        raise self._missing("get_test_data_path")

    def get_runs_path(self) -> str:
        raise self._missing("get_runs_path")

    def saving_runs(self) -> bool:
        """Are checkpoints and logs kept?"""
        return True

    def _missing(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {name}(): a Store of one's own "
                                   "must say where that is")

    # --- Files ---------------------------------------------------------------------------------

    def get_full_path(self, path: str) -> str:
        """The path as a URL, without a slash at its end."""
        local = re.fullmatch(r"file:/+(.*)", path)
        scheme, colon, rest = path.partition("://")
        if colon and local is None:
            return f"{scheme}://{rest.rstrip('/')}"
        return "file://" + os.path.abspath(f"/{local.group(1)}" if local else path)

    def get_full_path_fn(self) -> Callable[[str], str]:
        return self.get_full_path

    def get_localized_path(self, path: str) -> str:
        """The path without file://, for those who open files themselves."""
        return path[len("file://"):] if path.startswith("file://") else path

    def _open(self, path: str) -> Any:
        return open_filesystem(self.get_full_path(path), self.storage_options)

    @property
    def fs(self) -> pyarrow.fs.FileSystem:
        return self._open(self.get_train_data_path())[0]

    def exists(self, path: str) -> bool:
        fs, inner = self._open(path)
        return fs.get_file_info(inner).type != pyarrow.fs.FileType.NotFound

    def read(self, path: str) -> bytes:
        fs, inner = self._open(path)
        with fs.open_input_stream(inner) as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """All or nothing where the file system can rename."""
        fs, inner = self._open(path)
        fs.create_dir(posixpath.dirname(inner), recursive=True)
        with fs.open_output_stream(inner + ".part") as file:
            file.write(data)
        fs.move(inner + ".part", inner)

    def write_text(self, path: str, text: str) -> None:
        self.write(path, text.encode())

    def delete(self, path: str) -> None:
        fs, inner = self._open(path)
        fs.delete_dir(inner)

    def is_parquet_dataset(self, path: str) -> bool:
        fs, inner = self._open(path)
        if fs.get_file_info(inner).type != pyarrow.fs.FileType.Directory:
            return False
        return any(info.path.endswith(".parquet")
                   for info in fs.get_file_info(pyarrow.fs.FileSelector(inner, recursive=True)))

    def get_parquet_dataset(self, path: str) -> Any:
        import pyarrow.parquet

        fs, inner = self._open(path)
        return pyarrow.parquet.ParquetDataset(inner, filesystem=fs)

    def get_data_metadata_path(self, path: str) -> str:
        return path.rstrip("/") + "_metadata.json"

    # --- Runs ----------------------------------------------------------------------------------

    def get_run_path(self, run_id: str) -> str:
        return f"{self.get_runs_path()}/{run_id}"

    def get_checkpoint_filename(self) -> str:
        return self.CHECKPOINT_FILENAME

    def get_checkpoint_path(self, run_id: str) -> str:
        return f"{self.get_run_path(run_id)}/{self.get_checkpoint_filename()}"

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> List[str]:
        fs, inner = self._open(self.get_run_path(run_id))
        infos = fs.get_file_info(pyarrow.fs.FileSelector(inner, allow_not_found=True))
        return sorted(info.path for info in infos if info.path.endswith(suffix))

    def get_logs_subdir(self) -> str:
        return "logs"

    def get_logs_path(self, run_id: str) -> str:
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}"

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        """A context that gives a local folder to write into; sync_fn takes it from there."""
        @contextlib.contextmanager
        def local_dir() -> Iterator[str]:
            folder = tempfile.mkdtemp(prefix=f"{run_id}-")
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return local_dir

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """A function that copies a local folder's files to the run's path."""
        def sync(folder: str) -> None:
            for root, _, names in os.walk(folder):
                for name in names:
                    path = os.path.join(root, name)
                    with open(path, "rb") as file:
                        inner = os.path.relpath(path, folder).replace(os.sep, "/")
                        self.write(f"{self.get_run_path(run_id)}/{inner}", file.read())

        return sync

    def to_remote(self, run_id: str, dataset_idx: Optional[int] = None) -> RemoteStore:
        return RemoteStore(
            self.get_train_data_path(dataset_idx), self.get_val_data_path(dataset_idx),
            self.get_test_data_path(dataset_idx), self.saving_runs(), self.get_runs_path(),
            self.get_run_path(run_id), self.get_checkpoint_path(run_id),
            self.get_logs_path(run_id), self.get_checkpoint_filename(), self.get_logs_subdir(),
            self.get_local_output_dir_fn(run_id), self.sync_fn(run_id))

    def read_serialized_keras_model(self, ckpt_path: str, model: Any = None,
                                    custom_objects: Any = None) -> bytes:
        return self.read(ckpt_path)


class FilesystemStore(Store):
    """Local paths and every URL fsspec has a package for: s3://, gs://, abfs:// ..."""

    def __init__(self, prefix_path: str, train_path: Optional[str] = None,
                 val_path: Optional[str] = None, test_path: Optional[str] = None,
                 runs_path: Optional[str] = None, save_runs: bool = True,
                 storage_options: Optional[Dict[str, Any]] = None,
                 checkpoint_filename: Optional[str] = None) -> None:
        self.prefix_path = self.get_full_path(prefix_path)
        self.storage_options = storage_options or {}
        given = {"train": train_path, "val": val_path, "test": test_path}
        self._paths = {
            kind: self.get_full_path(path or f"{self.prefix_path}/intermediate_{kind}_data")
            for kind, path in given.items()}
        self._runs_path = self.get_full_path(runs_path or f"{self.prefix_path}/runs")
        self._save_runs = save_runs
        self._checkpoint_filename = checkpoint_filename or self.CHECKPOINT_FILENAME

    # --- Data ----------------------------------------------------------------------------------

    def _data_path(self, kind: str, idx: Optional[int]) -> str:
        path = self._paths[kind]
        return path if idx is None else f"{path}.{idx}"

    def get_train_data_path(self, idx: Optional[int] = None) -> str:
        return self._data_path("train", idx)

    def get_val_data_path(self, idx: Optional[int] = None) -> str:
        return self._data_path("val", idx)

    def get_test_data_path(self, idx: Optional[int] = None) -> str:
        return self._data_path("test", idx)

    def saving_runs(self) -> bool:
        return self._save_runs

    def get_runs_path(self) -> str:
        return self._runs_path

    def get_checkpoint_filename(self) -> str:
        return self._checkpoint_filename


AbstractFilesystemStore = FilesystemStore


class LocalStore(FilesystemStore):
    """A folder every host sees under the same path."""


class HDFSStore(FilesystemStore):
    """[hdfs://][host[:port]]/path; the libhdfs that comes with Hadoop must be found."""

    URL = re.compile(r"^(?:hdfs://(?P<host>[^/:]*)(?::(?P<port>\d+))?)?(?P<path>/.+)$")

    @staticmethod
    def matches(prefix_path: str) -> bool:
        return prefix_path.startswith("hdfs://")

    def __init__(self, prefix_path: str, host: Optional[str] = None, port: Optional[int] = None,
                 user: Optional[str] = None, kerb_ticket: Optional[str] = None,
                 driver: str = "libhdfs", extra_conf: Optional[Dict[str, str]] = None,
                 *args: Any, storage_options: Optional[Dict[str, Any]] = None,
                 **kwargs: Any) -> None:
        found = self.URL.match(prefix_path)
        if found is None:
            raise ValueError(f"{prefix_path!r} is not a path on HDFS: [hdfs://][host[:port]]/path")
        if driver != "libhdfs":
            raise ValueError(f"driver {driver!r}: only libhdfs is supported")
        host, port = host or found.group("host") or "", port or found.group("port")
        self._where = f"{host}:{port}" if port else host  # as in a URL
        options = {"user": user, "kerb_ticket": kerb_ticket, "extra_conf": extra_conf,
                   **(storage_options or {})}
        super().__init__(found.group("path"), *args, **kwargs, storage_options={
            name: value for name, value in options.items() if value is not None})

    def get_full_path(self, path: str) -> str:
        if not path.startswith("hdfs://"):
            path = f"hdfs://{self._where}{path}"
        return super().get_full_path(path)


class DBFSLocalStore(FilesystemStore):
    """Databricks' file system through its mount: /dbfs/path, dbfs:/path, file:///dbfs/path."""

    CHECKPOINT_FILENAME = "checkpoint.tf"

    @staticmethod
    def matches(prefix_path: str) -> bool:
        return prefix_path.startswith(("/dbfs/", "dbfs:/", "file:/dbfs/", "file:///dbfs/"))

    @staticmethod
    def normalize_path(path: str) -> str:
        return "/dbfs/" + re.sub(r"^(file://)?(file:)?(/dbfs/|dbfs:/)", "", path).lstrip("/")

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        if not self.matches(prefix_path):
            raise ValueError(f"{prefix_path!r} is not a path on DBFS: /dbfs/path or dbfs:/path")
        super().__init__(prefix_path, *args, **kwargs)

    def get_full_path(self, path: str) -> str:
        return super().get_full_path(self.normalize_path(path) if self.matches(path) else path)
