# SPDX-License-Identifier: Apache-2.0
"""Who writes which part of the tensors, and the files they are written to.

All ranks hold the same state, so each writes a share of it: the tensors are seen as one row of
bytes, cut into as many equal parts as there are ranks. Small tensors stay whole. Every rank works
out all shares by itself. A file is a safetensors file: the length of its header in 8 bytes, the
header as JSON, then the raw tensors; a part of a tensor is an entry "name[begin:end]" of one
dimension.
"""
import json
import zlib
from typing import NamedTuple

SPLIT_FROM_BYTES = 1 << 20  # smaller tensors are not cut
CHUNK_BYTES = 4 << 20  # what is written and summed at once
ALIGN_BYTES = 64
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
              "C128": 16, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
              "U8": 1, "BOOL": 1}


class About(NamedTuple):
    """What there is to know of a tensor beside its values."""

    dtype: str
    shape: tuple

    def n_elements(self):
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def n_bytes(self):
        return self.n_elements() * ITEM_BYTES[self.dtype]


class Piece(NamedTuple):
    """Elements begin to end of a tensor."""

    name: str
    begin: int
    end: int


def share(abouts, rank, n_ranks):
    """The pieces that a rank writes, of {name: About}."""
    total = sum(about.n_bytes() for about in abouts.values())
    first, last = total * rank // n_ranks, total * (rank + 1) // n_ranks
    pieces, at = [], 0
    for name, about in abouts.items():
        n_bytes, item = about.n_bytes(), ITEM_BYTES[about.dtype]
        if n_bytes >= SPLIT_FROM_BYTES:
            begin = max(first - at, 0) // item
            end = max(last - at, 0) // item if rank < n_ranks - 1 else n_bytes // item
            begin, end = min(begin, n_bytes // item), min(end, n_bytes // item)
            if begin < end:
                pieces.append(Piece(name, begin, end))
        elif first <= at < last or (at >= last and rank == n_ranks - 1):
            pieces.append(Piece(name, 0, about.n_elements()))
        at += n_bytes
    return pieces


def n_bytes_of(pieces, abouts):
    return sum((p.end - p.begin) * ITEM_BYTES[abouts[p.name].dtype] for p in pieces)


def _entry_name(piece, about):
    is_whole = piece.end - piece.begin == about.n_elements()
    return piece.name if is_whole else f"{piece.name}[{piece.begin}:{piece.end}]"


def make_header(pieces, abouts):
    """The first bytes of a file, up to the values."""
    header, at = {"__metadata__": {"format": "horovod.checkpoint"}}, 0
    for piece in pieces:
        about = abouts[piece.name]
        is_whole = piece.end - piece.begin == about.n_elements()
        n_bytes = (piece.end - piece.begin) * ITEM_BYTES[about.dtype]
        header[_entry_name(piece, about)] = {
            "dtype": about.dtype,
            "shape": list(about.shape) if is_whole else [piece.end - piece.begin],
            "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def write(file, pieces, abouts, values):
    """Writes a whole file of values, a memoryview; what the manifest has to know of it."""
    header = make_header(pieces, abouts)
    file.write(header)
    listed, at = [], 0
    for piece in pieces:
        n_bytes = (piece.end - piece.begin) * ITEM_BYTES[abouts[piece.name].dtype]
        sum_so_far = 0
        for begin in range(at, at + n_bytes, CHUNK_BYTES):
            chunk = values[begin:min(begin + CHUNK_BYTES, at + n_bytes)]
            file.write(chunk)
            sum_so_far = zlib.crc32(chunk, sum_so_far)
        listed.append({"tensor": piece.name, "begin": piece.begin, "end": piece.end,
                       "offset": len(header) + at, "crc32": sum_so_far})
        at += n_bytes
    return {"bytes": len(header) + at, "pieces": listed}


def check(abouts, parts):
    """Raises ValueError unless the pieces of all parts are every tensor, once."""
    cover = {name: [] for name in abouts}
    for part in parts:
        for piece in part["pieces"]:
            begin, end, item = piece["begin"], piece["end"], ITEM_BYTES[abouts[
                piece["tensor"]].dtype]
            if not (0 <= begin <= end and 0 <= piece["offset"] <= part["bytes"] - (end - begin)
                    * item):
                raise ValueError(f"{part['file']} is too short for its part of {piece['tensor']}")
            cover[piece["tensor"]].append((begin, end))
    for name, about in abouts.items():
        at = 0
        for begin, end in sorted(cover[name]):
            if begin != at:
                break
            at = end
        if at != about.n_elements():
            raise ValueError(f"{name} is not complete: did all ranks save the same state?")


def read_piece(file, piece, values):
    """Reads a piece into its place in a tensor's bytes; ValueError unless it is what was written.
    """
    sum_so_far, at = 0, 0
    file.seek(piece["offset"])
    while at < len(values):
        n = file.readinto(values[at:at + CHUNK_BYTES])
        if not n:
            raise ValueError(f"{piece['tensor']} ends too early")
        sum_so_far = zlib.crc32(values[at:at + n], sum_so_far)
        at += n
    if sum_so_far != piece["crc32"]:
        raise ValueError(f"{piece['tensor']} is damaged: its checksum differs")
