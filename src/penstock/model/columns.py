"""Columns: the body of every log batch, in Arrow's memory layout without Arrow's metadata.

A schema is a fixed, versioned list of columns. A body is

    u16 version | u16 runs | u32 present | fixed columns … | offsets and blob of binary columns …

with every buffer padded to 8 bytes and little-endian, so that numpy reads it in place and pyarrow
can wrap it. A column lives in one of three domains: one value per *entry*, one per *run* (a stretch
of entries that share a producer or consumer), or one *scalar*. Absent columns cost nothing: bit *i*
of `present` says whether column *i* is there, and a reader gives its default where it is not.

Decoding finds where each buffer lies; arrays are built when they are asked for.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption

Buffer = bytes | bytearray | memoryview
HEADER: Final = struct.Struct("<HHI")
RUNS_MAX: Final = 65535
_PADDING: Final = tuple(bytes(n) for n in range(8))
_FEW: Final = 64  # offsets that are sorted as a list sooner than compared as an array
# The codes with which `array` lays out a list of Python integers, several times faster than numpy.
_CODES: Final = {"uint8": "B", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q"}


class Domain(IntEnum):
    ENTRY = 0
    RUN = 1
    SCALAR = 2


class Column:
    """One column: `kind` is a numpy type name, or `binary` for offsets and a blob."""

    def __init__(
        self, name: str, kind: str, domain: Domain = Domain.ENTRY, *, default: int = 0
    ) -> None:
        self.name, self.kind, self.domain, self.default = name, kind, domain, default
        self.binary = kind == "binary"
        number = "int32" if self.binary else kind
        self.code, self.dtype = _CODES[number], np.dtype(number)
        self.width = self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Binary:
    """A binary column as it lies in memory: value *i* is `blob[offsets[i]:offsets[i + 1]]`."""

    offsets: NDArray[np.int32]
    blob: Buffer

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        return bytes(self.blob[self.offsets[index] : self.offsets[index + 1]])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.tolist())

    def tolist(self) -> list[bytes]:
        blob, ends = bytes(self.blob), self.offsets.tolist()
        return [blob[a:b] for a, b in pairwise(ends)]

    def take(self, indices: NDArray[np.int64]) -> list[bytes]:
        blob = self.blob
        starts = self.offsets[indices].tolist()
        ends = self.offsets[indices + 1].tolist()
        return [bytes(blob[a:b]) for a, b in zip(starts, ends, strict=True)]

    @staticmethod
    def of(values: Sequence[bytes]) -> Binary:
        return Binary(np.frombuffer(_offsets(values), np.int32), b"".join(values))


Value = NDArray[Any] | Binary | Sequence[int] | Sequence[Buffer]


class Schema:
    """A versioned list of columns; a column is only ever appended, together with a new version."""

    def __init__(self, version: int, columns: tuple[Column, ...]) -> None:
        self.version, self.columns = version, columns
        self.named = {column.name: column for column in columns}
        self._bits = [(1 << i, column) for i, column in enumerate(columns)]
        # Columns in the order of their buffers, by the `present` mask: as many as masks can be.
        self.layouts: dict[int, list[Column]] = {}

    def encode(self, count: int, values: Mapping[str, Value | None], *, runs: int = 0) -> bytes:
        """Lay the given columns out; a column that is missing or None is absent."""
        present = given = 0
        fixed: list[Buffer] = []
        binary: list[Buffer] = []
        lengths = (count, runs, 1)
        for bit, column in self._bits:
            value = values.get(column.name)
            if value is None:
                continue
            given += 1
            present |= bit
            length = lengths[column.domain]
            if len(value) != length:
                raise ValueError(f"column {column.name} has {len(value)} values, expected {length}")
            if isinstance(value, Binary):
                binary += (value.offsets.tobytes(), value.blob)
            elif isinstance(value, np.ndarray):
                fixed.append(value.astype(column.dtype, copy=False).tobytes())
            elif not column.binary:
                fixed.append(array(column.code, cast(Sequence[int], value)).tobytes())
            else:
                cells = cast(Sequence[Buffer], value)
                binary += (_offsets(cells), b"".join(cells))
        if given != len(values) and (unknown := values.keys() - self.named.keys()):
            raise ValueError(f"no such column: {sorted(unknown)}")
        parts: list[Buffer] = [HEADER.pack(self.version, runs, present)]
        for part in (*fixed, *binary):
            parts.append(part)
            if len(part) & 7:
                parts.append(_PADDING[-len(part) & 7])
        return b"".join(parts)

    def decode(self, body: Buffer, count: int) -> Columns:
        """Find the columns in `body`; raises `Corruption` when they do not fit into it."""
        return Columns(self, body, count)

    def lay_out(self, present: int) -> list[Column]:
        """The columns that `present` names, as they follow each other in a body."""
        if present >> len(self.columns):
            raise Corruption("a batch body names columns that its schema does not have")
        columns = [column for i, column in enumerate(self.columns) if present >> i & 1]
        columns.sort(key=lambda column: column.binary)
        self.layouts[present] = columns
        return columns


class Columns:
    """A decoded body: views into it, whose items are plain ints, and arrays over those.

    For a few values take them from `views`: making an array costs more than reading ten items of a
    view. Nothing may be written to either.
    """

    __slots__ = ("_cache", "blobs", "body", "count", "runs", "schema", "views")

    def __init__(self, schema: Schema, body: Buffer, count: int) -> None:
        self.schema, self.body, self.count = schema, body, count
        # By the names of the columns that are there: the values, or a binary column's offsets.
        self.views: dict[str, memoryview] = {}
        self.blobs: dict[str, memoryview] = {}  # what the offsets point into
        self._cache: dict[str, Any] = {}
        size = len(body)
        if size < HEADER.size:
            raise Corruption("a batch body is shorter than its own header")
        version, runs, present = HEADER.unpack_from(body)
        self.runs: int = runs
        if version > schema.version:
            raise Corruption(f"body schema version {version} is newer than {schema.version}")
        whole, at, lengths = memoryview(body), HEADER.size, (count, runs, 1)
        for column in schema.layouts.get(present) or schema.lay_out(present):
            end = at + (lengths[column.domain] + column.binary) * column.width
            if end > size:
                raise Corruption(f"column {column.name} exceeds the body")
            view = self.views[column.name] = whole[at:end].cast(column.code)  # type: ignore[call-overload]
            at = (end + 7) & ~7
            if column.binary:
                length = view[-1]
                if length < 0:
                    raise Corruption("a binary column has a negative length")
                self.blobs[column.name] = whole[at : at + length]
                at += (length + 7) & ~7
        if at != size:
            raise Corruption(f"a batch body has {size} bytes where its columns need {at}")

    def fixed(self, name: str) -> NDArray[Any]:
        """The column as an array, filled with its default where it is absent."""
        found = self._cache.get(name)
        if found is None:
            column = self.schema.named[name]
            if name in self.views:
                found = np.frombuffer(self.views[name], column.dtype)
            else:
                length = (self.count, self.runs, 1)[column.domain]
                found = np.full(length, column.default, column.dtype)
            self._cache[name] = found
        return found

    def binary(self, name: str) -> Binary | None:
        """The binary column, or None where it is absent (every value is empty)."""
        found = self._cache.get(name)
        if found is None and name in self.blobs:
            found = Binary(np.frombuffer(self.views[name], np.int32), self.blobs[name])
            self._cache[name] = found
        return found

    def validate(self) -> None:
        """Check what `decode` leaves open: offsets start at 0 and never step back."""
        for name in self.blobs:
            ends = self.views[name]
            if ends[0] or (len(ends) > 2 and not _ascending(ends)):
                raise Corruption(f"offsets of column {name} are not ascending from 0")


def _ascending(ends: memoryview) -> bool:
    if len(ends) <= _FEW:
        few = ends.tolist()
        return few == sorted(few)
    many = np.frombuffer(ends, np.int32)
    return not np.count_nonzero(many[1:] < many[:-1])


def _offsets(values: Sequence[Buffer]) -> bytes:
    try:
        return array("i", list(accumulate(map(len, values), initial=0))).tobytes()
    except OverflowError as error:
        raise ValueError("a binary column holds at most 2 GiB") from error
