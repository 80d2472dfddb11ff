"""Who makes deltas: what it knows of the vectors it changes, and what it has under way.

A delta names the delta it follows (its parent) and counts its origin's deltas of the vector. A
writer that is alone can fill both in: it remembers each vector's *head*. Heads live in columns,
addressed by a slot per vector, so that a bulk load chains its rows in a few array operations.

What a parent followed need not be named again: a delta's clock has its own origin, and the head's
origin if that is another.

Invariants: a slot's `counter` is how many deltas of the vector this writer's origin has made, those
in flight included; a head's time never falls; a head whose write failed is forgotten, and read from
the log again.

Payloads of many deltas are made from columns, without an object per delta. What all deltas of a
call have in the same place (header, clock entries, components) is laid out as one
matrix of bytes, a column at a time; only the names behind it differ in length and are joined row by
row. That is a microsecond or two per delta, nearly all of it in numpy.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, PenstockError
from penstock.model.columns import Binary
from penstock.model.delta import (
    HAS_INDICES,
    HAS_METADATA,
    HAS_PARENT,
    LOGICAL_BITS,
    NAMESPACE_BYTES_MAX,
    NO_ID,
    ORIGIN_BYTES_MAX,
    VECTOR_ID_BYTES_MAX,
    VERSION,
    Op,
    PriorityClass,
    Source,
)
from penstock.model.delta_batch import CLOCK_DTYPE, FIXED, PAIR

Ids = NDArray[np.uint8]  # (n, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaColumns:
    """What deltas change: a row each. `values` and `indices` are (n, k); no indices: dense. `op`
    and `priority` are one for all, or a column. Which delta follows which, and when, is not here:
    the writer fills that in."""

    vector_ids: Sequence[str] | Sequence[bytes]
    values: NDArray[np.float32]
    indices: NDArray[np.uint16] | None = None
    namespace: str | Sequence[str] = "default"  # one for all, or one for each
    op: Op | NDArray[np.uint8] | None = None  # None: SPARSE with indices, else DENSE
    priority: PriorityClass | NDArray[np.uint8] = PriorityClass.NORMAL
    source: Source = Source.WRITER
    metadata: Sequence[bytes] | None = None  # msgpack maps, or empty
    headers: bytes = b""  # of every message, a msgpack map

    def __len__(self) -> int:
        return len(self.vector_ids)

    def checked(self) -> DeltaColumns:
        """Itself with columns of the right types; `InvalidArgument` for shapes that do not fit."""
        count = len(self.vector_ids)
        values = np.ascontiguousarray(self.values, np.float32)
        if values.ndim != 2 or len(values) != count:
            raise InvalidArgument(f"values must be a matrix of {count} rows", field="values")
        if self.metadata is not None and len(self.metadata) != count:
            raise InvalidArgument(f"metadata must have {count} values", field="metadata")
        op = Op.DENSE if self.indices is None else Op.SPARSE
        return replace(
            self,
            values=values,
            indices=None if self.indices is None else self._indices(values.shape),
            op=self._column(op if self.op is None else self.op, count, "op"),
            priority=self._column(self.priority, count, "priority"),
        )

    def _indices(self, shape: tuple[int, ...]) -> NDArray[np.uint16]:
        wide = np.asarray(self.indices)
        if wide.shape != shape:
            raise InvalidArgument("indices and values differ in shape", field="indices")
        if wide.size and (wide.min() < 0 or wide.max() > 0xFFFF):
            raise InvalidArgument("an index is out of range", field="indices", limit=0xFFFF)
        return np.ascontiguousarray(wide, np.uint16)

    @staticmethod
    def _column(value: Any, count: int, field: str) -> NDArray[np.uint8]:
        column = np.asarray(value, np.uint8)
        if column.ndim and column.shape != (count,):
            raise InvalidArgument(f"{field} must be one value or {count}", field=field)
        return np.broadcast_to(column, count)


@dataclass(frozen=True, slots=True)
class Names:
    """Vectors by name, in UTF-8, and the hashes that stand for (namespace, id)."""

    spaces: list[bytes]
    ids: list[bytes]
    hashes: Ids
    digests: list[bytes]  # the same as `hashes`

    @staticmethod
    def of(namespace: str | Sequence[str], vector_ids: Sequence[str] | Sequence[bytes]) -> Names:
        ids = [v.encode() if isinstance(v, str) else bytes(v) for v in vector_ids]
        if isinstance(namespace, str):
            namespace = [namespace] * len(ids)
        spaces = [space.encode() for space in namespace]
        for names, most, field in (
            (spaces, NAMESPACE_BYTES_MAX, "namespace"),
            (ids, VECTOR_ID_BYTES_MAX, "vector_id"),
        ):
            for name in (min(names, key=len), max(names, key=len)) if names else ():
                _check_length(name, most, field)
        digest = xxhash.xxh3_128_digest
        digests = [digest(b"%b\0%b" % pair) for pair in zip(spaces, ids, strict=True)]
        hashes = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)
        return Names(spaces, ids, hashes, digests)


def _check_length(name: bytes, limit: int, field: str) -> None:
    if not 1 <= len(name) <= limit:
        raise InvalidArgument(
            f"{field} has {len(name)} bytes, must be from 1 to {limit}", field=field, limit=limit
        )


@dataclass(frozen=True, slots=True)
class Causes:
    """Which delta each one is and follows: ids, parents (zero: none), own counters, times, and what
    it has seen of other origins, as many in every row: (n, k) of `CLOCK_DTYPE`."""

    delta_ids: Ids
    parents: Ids
    counters: NDArray[np.uint64]
    times: NDArray[np.int64]
    others: NDArray[Any] | None = None


def encode_columns(
    columns: DeltaColumns, names: Names, causes: Causes, *, origin: bytes, rows: NDArray[np.int64]
) -> Binary:
    """The payloads of some rows of checked columns. `origin`: one for all, or sixteen bytes for
    each of these rows."""
    fixed = _fixed(columns, names, causes, origin=origin, rows=rows)
    tails = [names.spaces[row] + names.ids[row] for row in rows.tolist()]
    if columns.metadata is not None:
        tails = [t + columns.metadata[row] for t, row in zip(tails, rows.tolist(), strict=True)]
    width = fixed.shape[1]
    sizes = np.fromiter(map(len, tails), np.int64, len(tails)) + width
    offsets = np.zeros(len(tails) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise InvalidArgument("deltas of one request are over 2 GiB", field="values")
    heads = fixed.tobytes()
    parts = [b""] * (2 * len(tails))
    parts[0::2] = [heads[at : at + width] for at in range(0, len(heads), width)]
    parts[1::2] = tails
    return Binary(offsets.astype(np.int32), b"".join(parts))


def _fixed(
    columns: DeltaColumns, names: Names, causes: Causes, *, origin: bytes, rows: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Everything up to the names: as long in every row."""
    blocks = [_bytes(_header(columns, names, causes, origin=origin, rows=rows)[:, None], FIXED)]
    if causes.others is not None:
        blocks.append(_bytes(causes.others[rows], CLOCK_DTYPE))
    if columns.indices is not None:
        blocks.append(_bytes(columns.indices[rows], "<u2"))
    blocks.append(_bytes(columns.values[rows], "<f4"))
    return np.concatenate(blocks, axis=1)


def _bytes(matrix: NDArray[Any], dtype: Any) -> NDArray[np.uint8]:
    """A matrix's rows as bytes; it may have no columns."""
    cells = np.ascontiguousarray(matrix, dtype)
    width = cells.shape[1] * cells.itemsize
    return np.frombuffer(cells.tobytes(), np.uint8).reshape(len(cells), width)


def _header(
    columns: DeltaColumns, names: Names, causes: Causes, *, origin: bytes, rows: NDArray[np.int64]
) -> NDArray[Any]:
    head: NDArray[Any] = np.zeros(len(rows), FIXED)
    parents = causes.parents[rows]
    flags = parents.any(axis=1) * np.uint8(HAS_PARENT)
    if columns.indices is not None:
        flags |= np.uint8(HAS_INDICES)
    if columns.metadata is not None:
        lengths = np.fromiter((len(columns.metadata[r]) for r in rows.tolist()), "<u4", len(rows))
        head["metadata_bytes"] = lengths
        flags |= (lengths > 0) * np.uint8(HAS_METADATA)
    head["version"] = VERSION
    head["op"] = np.asarray(columns.op)[rows]
    head["priority"] = np.asarray(columns.priority)[rows]
    head["source"] = columns.source
    head["n"] = columns.values.shape[1]
    head["clocks"] = 1 if causes.others is None else 1 + causes.others.shape[1]
    head["flags"] = flags
    head["delta_id"] = _pairs(causes.delta_ids[rows])
    head["parent"] = _pairs(parents)
    head["origin"] = head["own"] = np.frombuffer(origin.ljust(16, b"\0"), PAIR[0]).reshape(-1, 2)
    head["time"] = causes.times[rows]
    head["vector"] = _pairs(names.hashes[rows])
    for name, texts in (("namespace_bytes", names.spaces), ("vector_id_bytes", names.ids)):
        head[name] = np.fromiter((len(texts[r]) for r in rows.tolist()), "<u2", len(rows))
    head["counter"] = causes.counters[rows]
    return head


def _pairs(sixteens: Ids) -> NDArray[np.uint64]:
    return np.ascontiguousarray(sixteens).view("<u8")


SLOTS_MIN: Final = 64


class HybridClock:
    """Hybrid time: unix milliseconds and a counter, never the same twice and never back."""

    def __init__(self) -> None:
        self._last = 0

    def tick(self, count: int = 1) -> int:
        """The first of `count` consecutive times."""
        now = time.time_ns() // 1_000_000 << LOGICAL_BITS
        first = max(now, self._last + 1)
        self._last = first + count - 1
        return first


@dataclass(frozen=True, slots=True)
class VectorHead:
    """The last delta of a vector as this writer knows it; empty for a vector without any."""

    delta_id: bytes | None = None
    counter: int = 0  # of the writer's own origin
    time: int = 0
    origin: bytes = b""  # whose delta the head is,
    origin_counter: int = 0  # and which of theirs


class VectorHeads:
    """Heads of a topic's vectors, by vector hash, as the writer `origin` needs them."""

    def __init__(self, origin: bytes) -> None:
        self.origin = origin
        self._origin = np.frombuffer(origin.ljust(16, b"\0"), np.uint8)
        self._slots: dict[bytes, int] = {}
        self._used = 0
        self._ids: Ids = np.zeros((SLOTS_MIN, 16), np.uint8)
        self._origins: Ids = np.zeros((SLOTS_MIN, 16), np.uint8)
        self._origin_counters: NDArray[np.uint64] = np.zeros(SLOTS_MIN, np.uint64)
        self._counters: NDArray[np.uint64] = np.zeros(SLOTS_MIN, np.uint64)
        self._times: NDArray[np.int64] = np.zeros(SLOTS_MIN, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, vector: bytes) -> bool:
        return vector in self._slots

    def get(self, vector: bytes) -> VectorHead:
        slot = self._slots.get(vector)
        if slot is None:
            return VectorHead()
        delta_id = self._ids[slot].tobytes()
        return VectorHead(
            None if delta_id == NO_ID else delta_id,
            int(self._counters[slot]),
            int(self._times[slot]),
            self._origins[slot].tobytes().rstrip(b"\0"),
            int(self._origin_counters[slot]),
        )

    def adopt(self, vector: bytes, head: VectorHead) -> None:
        """What the log says of a vector that nothing was known of."""
        slot = self._slot(vector)
        self._ids[slot] = np.frombuffer(head.delta_id or NO_ID, np.uint8)
        self._origins[slot] = np.frombuffer(head.origin.ljust(16, b"\0"), np.uint8)
        self._origin_counters[slot] = head.origin_counter
        self._counters[slot], self._times[slot] = head.counter, head.time

    def advance(self, vector: bytes, *, delta_id: bytes, counter: int, time: int) -> None:
        """The writer made a delta: it is the head now."""
        slot = self._slot(vector)
        self._ids[slot] = np.frombuffer(delta_id, np.uint8)
        self._origins[slot] = self._origin
        self._origin_counters[slot] = self._counters[slot] = counter
        self._times[slot] = max(int(self._times[slot]), time)

    def forget(self, vectors: Iterable[bytes]) -> None:
        """Whatever was noted of these may not be so: they are unknown again."""
        for vector in vectors:
            self._slots.pop(vector, None)

    def chain(self, names: Names, clock: HybridClock) -> Causes:
        """Let each row follow the row of its vector before it, the first one the vector's head. The
        heads move on to the last rows."""
        count = len(names.ids)
        order, starts = _groups(names.hashes)
        ends = np.append(starts[1:], count)
        sizes = ends - starts
        rank = np.arange(count) - np.repeat(starts, sizes)
        vectors = [names.digests[row] for row in order[starts].tolist()]
        slots = np.fromiter(map(self._slot, vectors), np.int64, len(vectors))
        made: Ids = np.frombuffer(os.urandom(16 * count), np.uint8).reshape(-1, 16)
        ids = made[order]
        parents = np.empty_like(ids)
        parents[1:] = ids[:-1]
        parents[starts] = self._ids[slots]
        counters = np.repeat(self._counters[slots], sizes) + (rank + 1).astype(np.uint64)
        times = np.maximum(
            clock.tick(count) + order, np.repeat(self._times[slots], sizes) + 1 + rank
        )
        last = ends - 1
        self._ids[slots], self._origins[slots] = ids[last], self._origin
        self._counters[slots] = self._origin_counters[slots] = counters[last]
        self._times[slots] = times[last]
        return Causes(made, _back(parents, order), _back(counters, order), _back(times, order))

    def _slot(self, vector: bytes) -> int:
        slot = self._slots.get(vector)
        if slot is None:
            slot = self._slots[vector] = self._used
            self._used += 1
            if self._used > len(self._times):
                self._grow()
        return slot

    def _grow(self) -> None:
        for name in ("_ids", "_origins", "_origin_counters", "_counters", "_times"):
            column: NDArray[Any] = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))


def _groups(hashes: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows in an order that keeps a vector's together and in sequence; where each vector begins."""
    halves = np.ascontiguousarray(hashes).view(np.uint64)
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    ordered = halves[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return order, np.flatnonzero(new)


def _back(column: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    """A column of sorted rows in the rows' own order."""
    found = np.empty_like(column)
    found[order] = column
    return found


T = TypeVar("T")
# The future of a change tells why it failed, or None once it is written.
Flight = asyncio.Future[BaseException | None]


class Flights:
    """Changes that are under way, by vector: who follows one that fails fails with it.

    A change names the one before it as its parent while that is still under way, so that many
    changes of a vector share a request. Should the first not be written and the second be, the
    second could never be released: its parent is missing. So a change counts as written once all
    those of its vectors that were under way before it are. After a failure nothing is known of a
    vector, and what it has become is read from the log when the last of them has ended.

    Invariant: a flight ends after all that were under way for one of its vectors before it.
    """

    def __init__(self, heads: VectorHeads) -> None:
        self._heads = heads
        self._last: dict[bytes, Flight] = {}  # of each vector that has one

    async def landed(self, vectors: Iterable[bytes]) -> None:
        """Wait until nothing of these vectors is under way."""
        while waiting := {self._last[vector] for vector in vectors if vector in self._last}:
            await asyncio.wait(waiting)

    async def of(self, vectors: Collection[bytes], writing: Awaitable[T]) -> T:
        """Write a change of some vectors, of which it is the head already."""
        own: Flight = asyncio.get_running_loop().create_future()
        before = {self._last[vector] for vector in vectors if vector in self._last}
        self._last.update(dict.fromkeys(vectors, own))
        try:
            found = await writing
            if before:
                await asyncio.wait(before)
                _raise_failed(before)
        except BaseException as error:
            self._heads.forget(vectors)
            self._end(own, vectors, before, error)
            raise
        self._end(own, vectors, before, None)
        return found

    def _end(
        self,
        own: Flight,
        vectors: Collection[bytes],
        before: Iterable[Flight],
        error: BaseException | None,
    ) -> None:
        """Whoever gives a change up does not wait for those before it; its flight does."""
        left = [flight for flight in before if not flight.done()]
        if left:
            left[0].add_done_callback(lambda _: self._end(own, vectors, left, error))
            return
        own.set_result(error)
        for vector in vectors:
            if self._last.get(vector) is own:
                del self._last[vector]


def _raise_failed(flights: Iterable[Flight]) -> None:
    for error in [flight.result() for flight in flights]:
        if isinstance(error, PenstockError):
            raise error
        if error is not None:
            raise PenstockError(f"the change before this one was given up: {error!r}")


class DeltaWriter:
    """Who makes deltas: one for each topic and origin, however many objects write through it."""

    def __init__(self, origin: str | None = None) -> None:
        self.origin = origin or secrets.token_hex(6)
        if not 1 <= len(self.origin.encode()) <= ORIGIN_BYTES_MAX:
            raise InvalidArgument(
                f"origin must have 1 to {ORIGIN_BYTES_MAX} bytes",
                field="origin",
                limit=ORIGIN_BYTES_MAX,
            )
        self.heads = VectorHeads(self.origin.encode())
        self.flights = Flights(self.heads)
        self.clock = HybridClock()
