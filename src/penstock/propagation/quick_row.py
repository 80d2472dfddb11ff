"""One delta as plain numbers, read from where its payload lies."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from operator import lt
from typing import Any, Final

import numpy as np

from penstock.model.columns import Buffer
from penstock.model.delta_format import (
    CLOCK,
    HAS_INDICES,
    HEADER,
    TIME_MAX,
    Op,
    PriorityClass,
)
from penstock.model.deltas import shapes

WIDE: Final = 32  # values above which arrays are quicker than numbers
# The header and the delta's own clock entry: ids as two numbers, without version and source.
_FIXED: Final = struct.Struct("<xBBxHBBQQQQ16sqQQHHI16xQ")
_HEADER: Final = HEADER.size
_CLOCK: Final = CLOCK.size
_OPS: Final = len(Op)
_PRIORITIES: Final = len(PriorityClass)


class Row:
    """The row at hand: one object is read into again and again."""

    __slots__ = (
        "_at", "_blob", "_dimensions", "_least", "_most", "_start", "chain", "clocks", "code",
        "counter", "flags", "high", "indices", "low", "metadata_bytes", "n", "namespace_bytes",
        "op", "origin", "parent_high", "parent_low", "priority", "sequence", "time", "time_ms",
        "values", "vector", "vector_high", "vector_id_bytes", "vector_low",
    )  # fmt: skip

    indices: Sequence[int] | None  # or an array, as `values`, if there are many
    values: Sequence[float]
    vector: int  # numbers in the ledger
    chain: int
    code: int
    sequence: int
    time_ms: int

    def __init__(self, dimensions: int) -> None:
        least, most = shapes(dimensions)
        self._dimensions, self._least, self._most = dimensions, least.tolist(), most.tolist()

    def read(self, blob: Buffer, start: int) -> bool:
        """Read a payload whose sizes are right; says whether it has the shape of a delta."""
        (
            op, self.priority, n, clocks, flags, self.low, self.high, self.parent_low,
            self.parent_high, self.origin, time, self.vector_low, self.vector_high,
            self.namespace_bytes, self.vector_id_bytes, self.metadata_bytes, self.counter,
        ) = _FIXED.unpack_from(blob, start)  # fmt: skip
        self._blob, self._start, self._at = blob, start, start + _HEADER + _CLOCK * clocks
        self.op, self.n, self.clocks, self.flags, self.time = op, n, clocks, flags, time
        if op >= _OPS or self.priority >= _PRIORITIES or not 1 <= time <= TIME_MAX:
            return False
        shape = op | (flags & HAS_INDICES) << 2
        if not self._least[shape] <= n <= self._most[shape]:
            return False
        if n > WIDE:
            return self._read_many(n, indexed=bool(flags & HAS_INDICES))
        return self._read_few(n, indexed=bool(flags & HAS_INDICES))

    def _read_few(self, n: int, *, indexed: bool) -> bool:
        numbers = _numbers(n, indexed).unpack_from(self._blob, self._at)
        self.indices, self.values = None, numbers
        if indexed:
            indices, self.values = numbers[:n], numbers[n:]
            self.indices = indices
            if indices[-1] >= self._dimensions or not all(map(lt, indices, indices[1:])):
                return False
        total = sum(self.values)
        return bool(total - total == 0)  # a number that is not finite leaves a trace in the sum

    def _read_many(self, n: int, *, indexed: bool) -> bool:
        at, self.indices = self._at, None
        if indexed:
            indices = np.frombuffer(self._blob, "<u2", n, at)
            self.indices, at = indices, at + 2 * n  # type: ignore[assignment]
            if indices[-1] >= self._dimensions or not (indices[1:] > indices[:-1]).all():
                return False
        values = np.frombuffer(self._blob, "<f4", n, at)
        self.values = values  # type: ignore[assignment]
        return bool(np.isfinite(values).all())

    def causes(self) -> Iterator[tuple[Any, ...]]:
        """The clock entries (origin, counter) but the delta's own."""
        return CLOCK.iter_unpack(self._blob[self._start + _HEADER + _CLOCK : self._at])

    def names(self) -> tuple[bytes, bytes]:
        start = self._names_at()
        middle = start + self.namespace_bytes
        return bytes(self._blob[start:middle]), bytes(
            self._blob[middle : middle + self.vector_id_bytes]
        )

    def metadata(self) -> bytes:
        start = self._names_at() + self.namespace_bytes + self.vector_id_bytes
        return bytes(self._blob[start : start + self.metadata_bytes])

    def _names_at(self) -> int:
        return int(self._at + self.n * (4 + (self.flags & HAS_INDICES)))


@cache  # at most as many as there may be numbers, twice
def _numbers(n: int, indexed: bool) -> struct.Struct:
    return struct.Struct(f"<{n}H{n}f" if indexed else f"<{n}f")
