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
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption

Buffer = bytes | bytearray | memoryview
HEADER: Final = struct.Struct("<HHI")
RUNS_MAX: Final = 65535
_PADDING: Final = tuple(bytes(n) for n in range(8))
_LENGTH: Final = struct.Struct("<i")
_OFFSET: Final = np.dtype(np.int32)
_FEW: Final = 64  # offsets that are sorted as a list sooner than compared as an array
_ONE: Final = struct.Struct("<ii")  # the offsets of a binary column with one value
# The codes with which `array` lays out a list of Python integers, several times faster than numpy.
_CODES: Final = {"uint8": "B", "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q"}


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
        offsets = np.fromiter(
            accumulate(map(len, values), initial=0), dtype=np.int64, count=len(values) + 1
        )
        if offsets[-1] > np.iinfo(np.int32).max:
            raise ValueError("a binary column holds at most 2 GiB")
        return Binary(offsets.astype(np.int32), b"".join(values))


Value = NDArray[Any] | Binary | Sequence[int] | Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A column as encode and decode need it, worked out once per schema."""

    name: str
    binary: bool
    domain: int  # which of (entries, runs, 1) is its length
    bit: int
    code: str
    dtype: np.dtype[Any]
    width: int  # bytes of one value
    default: int

    @staticmethod
    def of(column: Column, index: int) -> _Plan:
        dtype = _OFFSET if column.binary else np.dtype(column.dtype)
        code = "" if column.binary else _CODES[column.dtype]
        domain = (Domain.ENTRY, Domain.RUN, Domain.SCALAR).index(column.domain)
        return _Plan(
            column.name, column.binary, domain, 1 << index, code, dtype, dtype.itemsize,
            column.default,
        )  # fmt: skip


@dataclass(frozen=True)
class Schema:
    """A versioned list of columns; a column is only ever appended, together with a new version."""

    version: int
    columns: tuple[Column, ...]
    _plans: tuple[_Plan, ...] = field(init=False, repr=False, compare=False)
    _named: dict[str, _Plan] = field(init=False, repr=False, compare=False)
    # Columns in the order of their buffers, by the `present` mask: as many as masks can be.
    _layouts: dict[int, tuple[_Plan, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plans = tuple(_Plan.of(column, i) for i, column in enumerate(self.columns))
        object.__setattr__(self, "_plans", plans)
        object.__setattr__(self, "_named", {plan.name: plan for plan in plans})
        object.__setattr__(self, "_layouts", {})

    def encode(self, count: int, values: Mapping[str, Value | None], *, runs: int = 0) -> bytes:
        """Lay the given columns out; a column that is missing or None is absent."""
        present = known = 0
        fixed: list[bytes] = [b""]
        binary: list[bytes] = []
        lengths = (count, runs, 1)
        for plan in self._plans:
            value = values.get(plan.name)
            if value is None:
                known += plan.name in values
                continue
            known += 1
            present |= plan.bit
            length = lengths[plan.domain]
            if len(value) != length:
                raise ValueError(f"column {plan.name} has {len(value)} values, expected {length}")
            if plan.binary:
                _append_binary(binary, value)
            elif isinstance(value, np.ndarray):
                _append(fixed, value.astype(plan.dtype, copy=False).tobytes())
            else:
                _append(fixed, array(plan.code, cast(Sequence[int], value)).tobytes())
        if known != len(values):
            raise ValueError(f"no such column: {sorted(values.keys() - self._named.keys())}")
        fixed[0] = HEADER.pack(self.version, runs, present)
        return b"".join(fixed + binary)

    def decode(self, body: Buffer, count: int) -> Columns:
        """Find the columns in `body`; raises `Corruption` when they do not fit into it."""
        return Columns(self, body, count)

    def layout(self, present: int) -> tuple[_Plan, ...]:
        """The columns that `present` names, as they follow each other in a body."""
        found = self._layouts.get(present)
        if found is None:
            if present >> len(self.columns):
                raise Corruption("a batch body names columns that its schema does not have")
            plans = [plan for plan in self._plans if present & plan.bit]
            found = tuple(sorted(plans, key=lambda plan: plan.binary))
            self._layouts[present] = found
        return found


class Columns:
    """A decoded body. Arrays are views into the body: do not write to them."""

    __slots__ = ("_at", "_cache", "body", "count", "runs", "schema")

    def __init__(self, schema: Schema, body: Buffer, count: int) -> None:
        self.schema, self.body, self.count = schema, body, count
        self._cache: dict[str, Any] = {}
        size = len(body)
        if size < HEADER.size:
            raise Corruption("a batch body is shorter than its own header")
        version, runs, present = HEADER.unpack_from(body)
        self.runs: int = runs
        if version > schema.version:
            raise Corruption(f"body schema version {version} is newer than {schema.version}")
        self._at: dict[str, tuple[int, int]] = {}
        at = HEADER.size
        lengths = (count, runs, 1)
        for plan in schema.layout(present):
            length = lengths[plan.domain]
            self._at[plan.name] = (at, length)
            if plan.binary:
                at = self._skip_binary(at, length, size)
            else:
                at += (length * plan.width + 7) & ~7
        if at != size:
            raise Corruption(f"a batch body has {size} bytes where its columns need {at}")

    def _skip_binary(self, at: int, length: int, size: int) -> int:
        last = at + 4 * length
        if last + 4 > size:
            raise Corruption("a binary column's offsets exceed the body")
        (blob,) = _LENGTH.unpack_from(self.body, last)
        if blob < 0:
            raise Corruption("a binary column has a negative length")
        return at + ((4 * length + 11) & ~7) + ((int(blob) + 7) & ~7)

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def fixed(self, name: str) -> NDArray[Any]:
        """The column as an array, filled with its default where it is absent."""
        found = self._cache.get(name)
        if found is None:
            plan = self.schema._named[name]
            if name in self._at:
                at, length = self._at[name]
                found = np.frombuffer(self.body, plan.dtype, length, at)
            else:
                length = (self.count, self.runs, 1)[plan.domain]
                found = np.full(length, plan.default, plan.dtype)
            self._cache[name] = found
        return found

    def view(self, name: str) -> memoryview | None:
        """A fixed column, or a binary column's offsets, as a view whose items are plain ints.

        For picking a few values: making an array costs more than reading ten items of a view.
        """
        if name not in self._at:
            return None
        plan = self.schema._named[name]
        at, length = self._at[name]
        if plan.binary:
            length += 1
        size = length * plan.dtype.itemsize
        view = memoryview(self.body)[at : at + size]
        return view.cast(plan.code or "i")  # type: ignore[call-overload, no-any-return]

    def blob(self, name: str) -> memoryview:
        """A binary column's bytes, which its offsets point into."""
        at, length = self._at[name]
        start = at + ((4 * length + 11) & ~7)
        (size,) = _LENGTH.unpack_from(self.body, at + 4 * length)
        return memoryview(self.body)[start : start + size]

    def binary(self, name: str) -> Binary | None:
        """The binary column, or None where it is absent (every value is empty)."""
        if name not in self._at:
            return None
        found = self._cache.get(name)
        if found is None:
            at, length = self._at[name]
            offsets = np.frombuffer(self.body, _OFFSET, length + 1, at)
            start = at + ((4 * length + 11) & ~7)
            found = Binary(offsets, memoryview(self.body)[start : start + int(offsets[-1])])
            self._cache[name] = found
        return found

    def validate(self) -> None:
        """Check what `decode` leaves lazy: offsets start at 0 and never step back."""
        for name in self._at:
            if self.schema._named[name].binary:
                ends = self.view(name)
                assert ends is not None
                if ends[0] or not _ascending(ends):
                    raise Corruption(f"offsets of column {name} are not ascending from 0")


def _ascending(ends: memoryview) -> bool:
    """Whether offsets that begin with 0 never step back; the last is not negative."""
    if len(ends) <= 2:
        return True
    if len(ends) <= _FEW:
        few = ends.tolist()
        return few == sorted(few)
    many = np.frombuffer(ends, _OFFSET)
    return bool((many[1:] >= many[:-1]).all())


def _append(parts: list[bytes], data: bytes) -> None:
    parts.append(data)
    if len(data) & 7:
        parts.append(_PADDING[-len(data) & 7])


def _append_binary(parts: list[bytes], value: Any) -> None:
    """Offsets and blob of a binary column, each padded."""
    if isinstance(value, Binary):
        _append(parts, value.offsets.tobytes())
        _append(parts, bytes(value.blob))
        return
    if len(value) == 1:
        blob = bytes(value[0])
        parts.append(_ONE.pack(0, len(blob)))
    else:
        blob = b"".join(value)
        try:
            offsets = array("i", list(accumulate(map(len, value), initial=0)))
        except OverflowError as error:
            raise ValueError("a binary column holds at most 2 GiB") from error
        _append(parts, offsets.tobytes())
    _append(parts, blob)
