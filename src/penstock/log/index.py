"""Where a segment's batches lie: two compact arrays, kept beside a sealed segment in a sidecar.

The sidecar is a convenience. It is bound to its segment by range and size and covered by a CRC,
and is rebuilt from the segment whenever it is missing, damaged, or belongs to an older version of
it.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from pathlib import Path
from threading import get_ident

from crc32c import crc32c

from penstock.errors import Corruption
from penstock.log.files import Handle
from penstock.log.layout import INDEX_SIZE, IndexHeader


class Index:
    """First sequences and offsets of a segment's batches, ascending."""

    __slots__ = ("firsts", "offsets")

    def __init__(self) -> None:
        self.firsts = array("Q")
        self.offsets = array("Q")

    def add(self, first: int, offset: int) -> None:
        # A reader on another thread looks into `firsts`: the offset must be there before.
        self.offsets.append(offset)
        self.firsts.append(first)

    def find(self, sequence: int) -> int:
        """The position of the batch that covers `sequence`, if the segment does."""
        return bisect_right(self.firsts, sequence) - 1

    @property
    def bytes(self) -> int:
        return 16 * len(self.firsts)

    def save(self, path: Path, *, last: int, end: int) -> None:
        """Write the sidecar; it is not synced, because it can be rebuilt."""
        body = _little(self.firsts).tobytes() + _little(self.offsets).tobytes()
        header = IndexHeader(self.firsts[0], last, end, len(self.firsts), crc32c(body))
        # Two readers may rebuild the same index at once.
        new = path.with_name(f"{path.name}.{get_ident()}.tmp")
        new.write_bytes(header.encode() + body)
        new.rename(path)

    @staticmethod
    def load(path: Path, *, first: int, last: int, end: int) -> Index:
        """Read the sidecar of the segment so described; raises `Corruption` if it is not that."""
        data = path.read_bytes()
        header = IndexHeader.decode(data[:INDEX_SIZE])
        body = data[INDEX_SIZE:]
        if (header.first, header.last, header.end) != (first, last, end):
            raise Corruption("the index belongs to another version of its segment")
        if len(body) != 16 * header.batches or crc32c(body) != header.crc:
            raise Corruption("CRC mismatch in an index")
        index = Index()
        index.firsts.frombytes(body[: len(body) // 2])
        index.offsets.frombytes(body[len(body) // 2 :])
        index.firsts, index.offsets = _little(index.firsts), _little(index.offsets)
        return index


def _little(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values = array("Q", values)
        values.byteswap()
    return values


def sidecar(segment: Path) -> Path:
    return segment.with_suffix(".idx")


class Opened:
    """A segment's file and index, taken together so that a rewrite cannot part them."""

    __slots__ = ("handle", "index")

    def __init__(self, handle: Handle, index: Index) -> None:
        self.handle, self.index = handle, index
