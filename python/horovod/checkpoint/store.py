# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints are kept: a directory, also of NFS, or what fsspec reaches.

A name appears whole or not at all. In a directory a file is written under another name, brought to
the disk, and renamed, and the directory is brought to the disk too; object stores show an object
when it is complete.
"""
import contextlib
import os
import shutil

DRAFT = ".draft"


def store_of(path):
    """The store of a path, or of a URL such as s3://bucket/run."""
    path = os.fspath(path)
    return _Remote(path) if "://" in path else _Directory(path)


def _sync_directory(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Directory:
    def __init__(self, path):
        self.path = path

    def _full(self, *names):
        return os.path.join(self.path, *names)

    def folders(self):
        try:
            return [entry.name for entry in os.scandir(self.path) if entry.is_dir()]
        except FileNotFoundError:
            return []

    def files(self, folder):
        try:
            return [name for name in os.listdir(self._full(folder)) if not name.endswith(DRAFT)]
        except FileNotFoundError:
            return []

    def make(self, folder):
        os.makedirs(self._full(folder), exist_ok=True)
        _sync_directory(self.path)

    @contextlib.contextmanager
    def writing(self, folder, name):
        """A file to write; there under its name when the block has ended well."""
        path = self._full(folder, name)
        try:
            with open(path + DRAFT, "wb", buffering=0) as file:
                yield _Whole(file)
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path + DRAFT)
            raise
        os.rename(path + DRAFT, path)
        _sync_directory(self._full(folder))

    def reading(self, folder, name):
        return open(self._full(folder, name), "rb", buffering=0)

    def size(self, folder, name):
        return os.stat(self._full(folder, name)).st_size

    def remove_file(self, folder, name):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._full(folder, name))
            _sync_directory(self._full(folder))

    def remove(self, folder):
        shutil.rmtree(self._full(folder), ignore_errors=True)


class _Whole:
    """Writes all it is given: a raw file may write less, as on a disk that is nearly full."""

    def __init__(self, file):
        self._file = file

    def write(self, data):
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest):]


class _Remote:
    def __init__(self, url):
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(f"a checkpoint at {url} needs fsspec: pip install fsspec") from error
        self._fs, self.path = fsspec.core.url_to_fs(url)

    def _full(self, *names):
        return "/".join([self.path.rstrip("/"), *names])

    def _names(self, path, kind):
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries
                if entry["type"] == kind]

    def folders(self):
        return self._names(self.path, "directory")

    def files(self, folder):
        return self._names(self._full(folder), "file")

    def make(self, folder):
        self._fs.makedirs(self._full(folder), exist_ok=True)

    @contextlib.contextmanager
    def writing(self, folder, name):
        with self._fs.open(self._full(folder, name), "wb") as file:
            yield file

    def reading(self, folder, name):
        return self._fs.open(self._full(folder, name), "rb")

    def size(self, folder, name):
        return self._fs.info(self._full(folder, name))["size"]

    def remove_file(self, folder, name):
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(folder, name))

    def remove(self, folder):
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._full(folder), recursive=True)
