"""Columns: the body of every log batch, in Arrow's memory layout without Arrow's metadata.

A schema is a fixed, versioned list of columns. A body is

    u16 version | u16 runs | u32 present | fixed columns … | offsets and blob of binary columns …

with every buffer padded to 8 bytes and little-endian, so that numpy reads it in place and pyarrow
can wrap it. A column lives in one of three domains: one value per *entry*, one per *run* (a stretch
of entries that share a producer or consumer), or one *scalar*. Absent columns cost nothing: bit *i*
of `present` says whether column *i* is there, and a reader gives its default where it is not.

Decoding is lazy: `Columns` computes where buffers lie and builds an array when it is asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption

Buffer = bytes | bytearray | memoryview
HEADER: Final = struct.Struct("<HHI")
RUNS_MAX: Final = 65535
_PADDING: Final = tuple(bytes(n) for n in range(8))


class Domain(Enum):
    ENTRY = "entry"
    RUN = "run"
    SCALAR = "scalar"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `dtype` is a numpy type name, or `binary` for offsets and a blob."""

    name: str
    dtype: str
    domain: Domain = Domain.ENTRY
    default: int = 0

    @property
    def binary(self) -> bool:
        return self.dtype == "binary"


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
        blob, ends = bytes(self.blob), self.offsets.tolist()
        return (blob[a:b] for a, b in pairwise(ends))

    def take(self, indices: NDArray[np.int64]) -> list[bytes]:
        blob = self.blob
        starts = self.offsets[indices].tolist()
        ends = self.offsets[indices + 1].tolist()
        return [bytes(blob[a:b]) for a, b in zip(starts, ends, strict=True)]

    @staticmethod
    def of(values: Sequence[bytes]) -> Binary:
        offsets = np.fromiter(
            accumulate(map(len, values), initial=0), dtype=np.int64, count=len(values) + 1
        )
        if offsets[-1] > np.iinfo(np.int32).max:
            raise ValueError("a binary column holds at most 2 GiB")
        return Binary(offsets.astype(np.int32), b"".join(values))


Value = NDArray[Any] | Binary | Sequence[int] | Sequence[Buffer]


@dataclass(frozen=True)
class Schema:
    """A versioned list of columns; a column is only ever appended, together with a new version."""

    version: int
    columns: tuple[Column, ...]
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", {c.name: i for i, c in enumerate(self.columns)})

    def encode(self, count: int, values: Mapping[str, Value | None], *, runs: int = 0) -> bytes:
        """Lay the given columns out; a column that is missing or None is absent."""
        present = 0
        fixed: list[bytes] = []
        binary: list[bytes] = []
        for i, column in enumerate(self.columns):
            value = values.get(column.name)
            if value is None:
                continue
            present |= 1 << i
            length = self._length(column, count, runs)
            if column.binary:
                cell = value if isinstance(value, Binary) else Binary.of(value)  # type: ignore[arg-type]
                _expect(column, len(cell), length)
                _append(binary, cell.offsets.tobytes())
                _append(binary, bytes(cell.blob))
            else:
                array = np.ascontiguousarray(value, dtype=column.dtype)
                _expect(column, len(array), length)
                _append(fixed, array.tobytes())
        unknown = values.keys() - self._index.keys()
        if unknown:
            raise ValueError(f"no such column: {sorted(unknown)}")
        return b"".join((HEADER.pack(self.version, runs, present), *fixed, *binary))

    def decode(self, body: Buffer, count: int) -> Columns:
        """Find the columns in `body`; raises `Corruption` when they do not fit into it."""
        return Columns(self, body, count)

    @staticmethod
    def _length(column: Column, count: int, runs: int) -> int:
        if column.domain is Domain.ENTRY:
            return count
        return runs if column.domain is Domain.RUN else 1


class Columns:
    """A decoded body. Arrays are views into the body: do not write to them."""

    __slots__ = ("_at", "_cache", "body", "count", "runs", "schema")

    def __init__(self, schema: Schema, body: Buffer, count: int) -> None:
        self.schema, self.body, self.count = schema, body, count
        self._cache: dict[str, Any] = {}
        size = len(body)
        if size < HEADER.size:
            raise Corruption("a batch body is shorter than its own header")
        version, self.runs, present = HEADER.unpack_from(body)
        if version > schema.version:
            raise Corruption(f"body schema version {version} is newer than {schema.version}")
        self._at: dict[str, tuple[int, int]] = {}
        at = HEADER.size
        columns = [c for i, c in enumerate(schema.columns) if present >> i & 1]
        if present >> len(schema.columns):
            raise Corruption("a batch body names columns that its schema does not have")
        for column in columns:
            if not column.binary:
                length = schema._length(column, count, self.runs)
                self._at[column.name] = (at, length)
                at += _padded(length * np.dtype(column.dtype).itemsize)
        for column in columns:
            if column.binary:
                length = schema._length(column, count, self.runs)
                self._at[column.name] = (at, length)
                at = self._skip_binary(at, length, size)
        if at != size:
            raise Corruption(f"a batch body has {size} bytes where its columns need {at}")

    def _skip_binary(self, at: int, length: int, size: int) -> int:
        last = at + 4 * length
        if last + 4 > size:
            raise Corruption("a binary column's offsets exceed the body")
        blob = int.from_bytes(self.body[last : last + 4], "little", signed=True)
        if blob < 0:
            raise Corruption("a binary column has a negative length")
        return at + _padded(4 * (length + 1)) + _padded(blob)

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def fixed(self, name: str) -> NDArray[Any]:
        """The column as an array, filled with its default where it is absent."""
        found = self._cache.get(name)
        if found is None:
            column = self.schema.columns[self.schema._index[name]]
            if name in self._at:
                at, length = self._at[name]
                found = np.frombuffer(self.body, column.dtype, length, at)
            else:
                length = self.schema._length(column, self.count, self.runs)
                found = np.full(length, column.default, column.dtype)
            self._cache[name] = found
        return found

    def binary(self, name: str) -> Binary | None:
        """The binary column, or None where it is absent (every value is empty)."""
        if name not in self._at:
            return None
        found = self._cache.get(name)
        if found is None:
            at, length = self._at[name]
            offsets = np.frombuffer(self.body, np.int32, length + 1, at)
            start = at + _padded(4 * (length + 1))
            found = Binary(offsets, memoryview(self.body)[start : start + int(offsets[-1])])
            self._cache[name] = found
        return found

    def validate(self) -> None:
        """Check what `decode` leaves lazy: offsets start at 0 and never step back."""
        for column in self.schema.columns:
            cell = self.binary(column.name) if column.binary else None
            if cell is not None and (cell.offsets[0] != 0 or np.any(np.diff(cell.offsets) < 0)):
                raise Corruption(f"offsets of column {column.name} are not ascending from 0")


def _padded(size: int) -> int:
    return (size + 7) & ~7


def _append(parts: list[bytes], data: bytes) -> None:
    parts.append(data)
    if len(data) & 7:
        parts.append(_PADDING[-len(data) & 7])


def _expect(column: Column, have: int, want: int) -> None:
    if have != want:
        raise ValueError(f"column {column.name} has {have} values, expected {want}")
