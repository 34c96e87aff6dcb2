# SPDX-License-Identifier: Apache-2.0
"""Training data from Parquet: each rank reads its share of the rows, in batches.

    reader = ParquetReader("file:///data/train", batch_size=100, shard=hvd.rank(),
                           n_shards=hvd.size(), seed=1)
    for epoch in range(10):
        for batch in reader.epoch(epoch):      # {column: NumPy array}
            ...

An epoch is one order of the row groups, made from the seed and the epoch's number and so the same
on all ranks. Rank k takes the k-th of n equal stretches of that order. It reads whole row groups
but for the two at the ends of its stretch, works with fewer row groups than ranks, and every rank
makes the same number of equal batches, which collective operations need: stretches are rounded up,
so at most n - 1 rows come twice in an epoch. Rows are mixed within a window of row groups.

What petastorm has written is read as well (petastorm_format.py). Paths are local, or URLs: hdfs://
through pyarrow, the others through fsspec. Columns are unpacked by Arrow's threads, of which there
are OMP_NUM_THREADS; a reader is for one thread.
"""
import itertools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.fs
import pyarrow.parquet

from horovod.spark import petastorm_format

Batch = Dict[str, np.ndarray]


def open_filesystem(path: str, storage_options: Optional[Dict[str, Any]] = None
                    ) -> Tuple[pa.fs.FileSystem, str]:
    """The file system a path or URL is on, and the path on it."""
    scheme, colon, rest = path.partition("://")
    if not colon:
        return pa.fs.LocalFileSystem(), path[5:] if path.startswith("file:/") else path
    if scheme == "file":
        return pa.fs.LocalFileSystem(), rest
    if scheme == "hdfs":
        where, _, inner = rest.partition("/")
        host, _, port = where.partition(":")
        return pa.fs.HadoopFileSystem(host or "default", int(port or 0),
                                      **(storage_options or {})), f"/{inner}"
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(f"{path}: fsspec is needed for {scheme}:// paths; "
                          "pip install fsspec and its package for this scheme") from error
    fs, inner = fsspec.core.url_to_fs(path, **(storage_options or {}))
    return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fs)), inner


class Piece(NamedTuple):
    """Rows of one row group: all, or some in a row."""
    group: int  # index into ParquetReader.groups
    first: int
    n_rows: int


class Group(NamedTuple):
    path: str
    index: int
    n_rows: int


def stretch(order: Sequence[int], rows_of: Sequence[int], first: int, n_rows: int) -> List[Piece]:
    """The pieces that hold n_rows from row `first` on, of the groups in this order, going round."""
    pieces: List[Piece] = []
    at = 0
    for group in itertools.chain(order, order):
        end = at + rows_of[group]
        start = max(first, at)
        take = min(first + n_rows, end) - start
        if take > 0:
            pieces.append(Piece(group, start - at, take))
        at = end
        if at >= first + n_rows:
            break
    return pieces


def to_numpy(name: str, column: pa.ChunkedArray) -> np.ndarray:
    """One value, or a list of the same length, for each row."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return lists_to_numpy(name, column)
    check_full(name, kind, column.null_count)
    if is_bare(column):
        return np.from_dlpack(column.chunk(0))
    return column.to_numpy()


def lists_to_numpy(name: str, column: pa.ChunkedArray) -> np.ndarray:
    """A matrix: a row of it for each row."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    inner = array.type.value_type
    if pa.types.is_nested(inner):
        raise ValueError(f"column {name!r} has lists of {inner}; only lists of plain values make a "
                         "tensor")
    lengths = np.unique(pa.compute.list_value_length(array).to_numpy(zero_copy_only=False))
    if len(lengths) > 1 or array.null_count:
        raise ValueError(f"column {name!r} has lists of different lengths, or none in some rows; "
                         "only lists of one length make a tensor")
    values = array.flatten()
    check_full(name, inner, values.null_count)
    return values.to_numpy(zero_copy_only=False).reshape(len(array), int(lengths[0]))


def check_full(name: str, kind: pa.DataType, n_empty: int) -> None:
    """Floats have NaN and strings None for an empty value; the other kinds have nothing."""
    if n_empty and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"column {name!r} of type {kind} has empty values in {n_empty} places; "
                         "fill them before training, or make it a float column")


def is_bare(column: pa.ChunkedArray) -> bool:
    """Whether the memory of a column can be used as it is. Arrow's own to_numpy() would do the same
    but imports pandas for it, which takes longer than to read a million rows."""
    kind = column.type
    return (column.num_chunks == 1 and column.null_count == 0
            and (pa.types.is_integer(kind) or pa.types.is_floating(kind))
            and hasattr(pa.Array, "__dlpack__"))


def is_hidden(path: str, root: str) -> bool:
    """Spark's own rule: what begins like this, or is in a folder that does, is not data."""
    below = path[len(root):] if path.startswith(root) else path
    return any(part.startswith(("_", ".")) for part in below.split("/"))


def own(values: np.ndarray) -> np.ndarray:
    """An array its user may write to: what is not mixed is still the memory of Arrow."""
    return values if values.flags.writeable else values.copy()


def join(parts: List[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def take(block: Batch, order: Optional[np.ndarray], first: int, end: int) -> Batch:
    """Rows first to end, of a block as it is or in an order. A mixed batch is a copy, made only
    now: so small a piece of memory is still in the cache when it is used, and soon used again."""
    if order is None:
        return {name: values[first:end] for name, values in block.items()}
    rows = order[first:end]
    return {name: values.take(rows, axis=0, mode="clip") for name, values in block.items()}


def as_torch(batch: Batch) -> Dict[str, Any]:
    """A batch of PyTorch tensors, which their user may write to."""
    import torch

    def tensor(name: str, values: np.ndarray) -> Any:
        if values.dtype.kind not in "biufc":
            raise TypeError(f"column {name!r} has values of NumPy's type {values.dtype}, which "
                            "no tensor can hold; leave it out with columns=, or make numbers "
                            "of it with a transform")
        return torch.from_numpy(np.ascontiguousarray(own(values)))

    return {name: tensor(name, values) for name, values in batch.items()}


class ParquetReader:
    """Rows of a Parquet file or folder, sharded. `columns` are in the order asked for.

    shuffle_rows: rows are mixed within windows of at least this many. drop_last leaves an
    incomplete last batch out, on all ranks alike. transform: a function of one batch. cache: what
    has been read stays in memory.
    """

    def __init__(self, path: str, columns: Optional[Sequence[str]] = None, batch_size: int = 32,
                 shard: int = 0, n_shards: int = 1, seed: Optional[int] = 0, shuffle: bool = True,
                 shuffle_rows: int = 1 << 16, drop_last: bool = False,
                 transform: Optional[Callable[[Batch], Batch]] = None,
                 storage_options: Optional[Dict[str, Any]] = None, cache: bool = False) -> None:
        if not 0 <= shard < n_shards:
            raise ValueError(f"shard {shard} of {n_shards}: it must be from 0 to {n_shards - 1}")
        self._fs, root = open_filesystem(path, storage_options)
        self._files: Dict[str, pa.parquet.ParquetFile] = {}
        self.groups: List[Group] = []
        self.n_bytes = 0  # before compression
        for file in self._list(root):
            metadata = self._open(file).metadata
            groups = [Group(file, i, metadata.row_group(i).num_rows)
                      for i in range(metadata.num_row_groups)]
            self.groups += [group for group in groups if group.n_rows > 0]
            self.n_bytes += sum(metadata.row_group(group.index).total_byte_size
                                for group in groups)
        if not self.groups:
            raise ValueError(f"{path}: no Parquet files with rows")
        self.schema: pa.Schema = self._open(self.groups[0].path).schema_arrow
        self.columns = list(columns) if columns is not None else list(self.schema.names)
        missing = [name for name in self.columns if name not in self.schema.names]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; it has "
                             f"{', '.join(self.schema.names)}")
        self._fields = {name: field for name, field in
                        petastorm_format.read_schema(self._fs, root).items()
                        if name in self.columns}
        for name, field in self._fields.items():
            petastorm_format.check(name, field)
        self.n_rows = sum(group.n_rows for group in self.groups)
        self.rows_per_shard = -(-self.n_rows // n_shards)
        self._drop_last = drop_last
        self._first_row = shard * self.n_rows // n_shards
        self._shard = shard
        self._seed = seed or 0
        self._shuffle = shuffle
        self._window = shuffle_rows if shuffle else 0  # 0: rows stay as they are
        self._transform = transform
        self._cached: Optional[Dict[int, pa.Table]] = {} if cache else None
        self.set_batches(batch_size)

    def set_batches(self, batch_size: Optional[int] = None, window: Optional[int] = None) -> None:
        """Rows in a batch, and in a window they are mixed in, 0 for none; None: as it was."""
        if batch_size is not None:
            if batch_size < 1:
                raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
            self.batch_size = batch_size
            self.steps_per_epoch = (self.rows_per_shard // batch_size if self._drop_last
                                    else -(-self.rows_per_shard // batch_size))
        if window is not None:
            self._window = window

    def _list(self, root: str) -> List[str]:
        if self._fs.get_file_info(root).type == pa.fs.FileType.File:
            return [root]
        infos = self._fs.get_file_info(pa.fs.FileSelector(root, recursive=True))
        return sorted(info.path for info in infos
                      if info.is_file and info.size > 0 and not is_hidden(info.path, root))

    def _open(self, path: str) -> pa.parquet.ParquetFile:
        if path not in self._files:
            self._files[path] = pa.parquet.ParquetFile(self._fs.open_input_file(path))
        return self._files[path]

    def _read(self, piece: Piece) -> Batch:
        table = self._cached.get(piece.group) if self._cached is not None else None
        if table is None:
            group = self.groups[piece.group]
            table = self._open(group.path).read_row_group(group.index, columns=self.columns,
                                                          use_threads=pa.cpu_count() > 1)
            if self._cached is not None:
                self._cached[piece.group] = table
        table = table.slice(piece.first, piece.n_rows)
        return {name: self._to_numpy(name, table.column(name)) for name in self.columns}

    def _to_numpy(self, name: str, column: pa.ChunkedArray) -> np.ndarray:
        field = self._fields.get(name)
        if field is None:
            return to_numpy(name, column)
        if field.codec in petastorm_format.CODECS:
            return petastorm_format.decode(name, field, column)
        return petastorm_format.as_declared(field, to_numpy(name, column))

    def sample(self, columns: List[str]) -> Batch:
        """One row, as it is in the file: what shapes and types there are."""
        group = self.groups[0]
        record = next(self._open(group.path).iter_batches(1, [group.index], columns))
        return {name: self._to_numpy(name, pa.chunked_array([record.column(name)]))
                for name in columns}

    def _pieces(self, epoch: int) -> List[Piece]:
        """What this shard reads in an epoch, in order."""
        order = list(range(len(self.groups)))
        if self._shuffle:  # alike on all ranks
            order = np.random.default_rng([self._seed, epoch]).permutation(order).tolist()
        return stretch(order, [group.n_rows for group in self.groups], self._first_row,
                       self.rows_per_shard)

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """The batches of one epoch: steps_per_epoch of them."""
        mixer = np.random.default_rng([self._seed, number, self._shard + 1])
        window = max(self._window, self.batch_size)
        pieces = self._pieces(number)
        parts: List[Batch] = []  # what is in memory and in no batch yet
        n_rows = n_made = 0
        for n_read, piece in enumerate(pieces, 1):
            parts.append(self._read(piece))
            n_rows += piece.n_rows
            if n_rows < window and n_read < len(pieces):
                continue
            block = join(parts)
            mix = mixer.permutation(n_rows) if self._window else None
            n_whole = n_rows - n_rows % self.batch_size
            for at in range(0, n_whole, self.batch_size):
                n_made += 1
                yield self._finish(take(block, mix, at, at + self.batch_size))
            parts = [take(block, mix, n_whole, n_rows)] if n_whole < n_rows else []
            n_rows -= n_whole
        if n_rows > 0 and n_made < self.steps_per_epoch:
            yield self._finish(parts[0])

    def _finish(self, batch: Batch) -> Batch:
        if self._transform is None:
            return batch
        return self._transform({name: own(values) for name, values in batch.items()})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    # --- Faces -------------------------------------------------------------------------------

    def torch(self, epoch: int = 0) -> Iterator[Dict[str, Any]]:
        """The batches of one epoch as PyTorch tensors."""
        for batch in self.epoch(epoch):
            yield as_torch(batch)

    def tf_dataset(self, epochs: Optional[int] = None) -> Any:
        """A tf.data.Dataset of batches, epoch after epoch; epochs None: without end."""
        import tensorflow as tf

        if self.steps_per_epoch == 0:
            raise ValueError(f"an epoch has no batches: {self.rows_per_shard} rows do not fill one "
                             f"of {self.batch_size}, and incomplete ones are dropped")

        def batches() -> Iterator[Batch]:
            for epoch in itertools.count() if epochs is None else range(epochs):
                yield from self.epoch(epoch)

        sample = next(self.epoch(0))
        signature = {name: tf.TensorSpec((None,) + values.shape[1:],
                                         tf.string if values.dtype == object else values.dtype)
                     for name, values in sample.items()}
        return tf.data.Dataset.from_generator(batches, output_signature=signature)
