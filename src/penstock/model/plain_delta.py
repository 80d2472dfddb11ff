"""A quick look at a delta: is it surely a valid one? And a quick way to lay one out.

Most deltas have one clock entry, names in ASCII, no metadata and few values. For these everything
that `check` asks is asked here, in a few microseconds. Of any other the answer is no, which means
nothing but that `check` has to say, or `encode`.
"""

from __future__ import annotations

import struct
from functools import cache
from operator import lt
from typing import Any, Final

import numpy as np
import xxhash

from penstock.model.delta import Delta
from penstock.model.delta_format import (
    AHEAD_MS_MAX,
    COUNTER_MAX,
    HAS_INDICES,
    HAS_PARENT,
    LOGICAL_BITS,
    NAMESPACE_BYTES_MAX,
    NO_ID,
    ORIGIN_BYTES_MAX,
    TIME_MAX,
    VECTOR_ID_BYTES_MAX,
    VERSION,
    Op,
    PriorityClass,
    Source,
)
from penstock.model.deltas import origin_fits

WIDE: Final = 32  # values above which an array is quicker than numbers
_FIXED: Final = struct.Struct("<BBBBHBB16s16s16sq16sHHI16sQ")  # the header and its own clock entry
_CLASSES, _SOURCES = len(PriorityClass), len(Source)


class PlainDeltas:
    """The question for topics of so many `dimensions`."""

    __slots__ = ("_dimensions", "_shapes")

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        whole, some = (dimensions, dimensions), (1, dimensions)
        # By op and whether it has indices: how few and how many values.
        self._shapes = {
            (Op.CREATE, False): whole, (Op.DENSE, False): whole, (Op.SPARSE, True): some,
            (Op.SCALE, False): (1, 1), (Op.OFFSET, False): whole, (Op.OFFSET, True): some,
            (Op.DELETE, False): (0, 0),
        }  # fmt: skip

    def sure(self, payload: bytes, *, now_ms: int) -> bool:
        if len(payload) < _FIXED.size:
            return False
        (
            version, op, priority, source, n, clocks, flags, id_, parent, origin, time, vector,
            namespace_bytes, vector_id_bytes, metadata_bytes, own, counter,
        ) = _FIXED.unpack_from(payload)  # fmt: skip
        indexed = bool(flags & HAS_INDICES)
        least, most = self._shapes.get((op, indexed), (1, 0))
        names_at = _FIXED.size + n * (6 if indexed else 4)
        return (
            version == VERSION
            and least <= n <= most
            and priority < _CLASSES
            and source < _SOURCES
            and clocks == 1
            and metadata_bytes == 0
            and flags & ~HAS_INDICES == (0 if parent == NO_ID else HAS_PARENT)
            and id_ not in (NO_ID, parent)
            and own == origin
            and 1 <= counter <= COUNTER_MAX
            and 1 <= time <= TIME_MAX
            and time >> LOGICAL_BITS <= now_ms + AHEAD_MS_MAX
            and 1 <= namespace_bytes <= NAMESPACE_BYTES_MAX
            and 1 <= vector_id_bytes <= VECTOR_ID_BYTES_MAX
            and len(payload) == names_at + namespace_bytes + vector_id_bytes
            and origin_fits(origin)
            and _names_fit(payload[names_at:], namespace_bytes, vector)
            and self._numbers_fit(payload, n, indexed=indexed)
        )

    def encode(self, delta: Delta) -> bytes | None:
        """The payload of a delta that is plain and surely valid; None: `delta.encode` has to say.

        What it gives is what that gives.
        """
        if delta.metadata is not None or len(delta.clock) != 1:
            return None
        indices, values = _few(delta.indices, "iu"), _few(delta.values, "iuf")
        id_, parent, time = delta.delta_id, delta.parent, delta.time
        counter = delta.clock.get(delta.origin)
        if indices is None or values is None or counter is None:
            return None
        indexed, n = delta.indices is not None, len(values)
        least, most = self._shapes.get((delta.op, indexed), (1, 0))
        names = _plain_names(delta)
        if (
            names is None
            or not least <= n <= most
            or (indexed and not (len(indices) == n and self._rise(indices)))
            or not (0 <= delta.priority < _CLASSES and 0 <= delta.source < _SOURCES)
            or not (type(time) is type(counter) is int)
            or not (1 <= time <= TIME_MAX and 1 <= counter <= COUNTER_MAX)
            or not (_is_id(id_) and (parent is None or (_is_id(parent) and parent != id_)))
        ):
            return None
        namespace, vector_id, origin = names
        flags = HAS_INDICES * indexed | HAS_PARENT * (parent is not None)
        digest = xxhash.xxh3_128_digest(namespace + b"\0" + vector_id)
        try:
            head = _FIXED.pack(
                VERSION, delta.op, delta.priority, delta.source, n, 1, flags, id_, parent or NO_ID,
                origin, time, digest, len(namespace), len(vector_id), 0, origin, counter,
            )  # fmt: skip
            numbers = _numbers(n, indexed).pack(*indices, *values)
        except (struct.error, OverflowError):
            return None
        total = sum(values)
        return head + numbers + namespace + vector_id if total - total == 0 else None

    def _rise(self, indices: list[int]) -> bool:
        within = not indices or (indices[0] >= 0 and indices[-1] < self._dimensions)
        return within and all(map(lt, indices, indices[1:]))

    def _numbers_fit(self, payload: bytes, n: int, *, indexed: bool) -> bool:
        """Indices rise and stay below the dimensions, values are finite."""
        if n > WIDE:
            return self._many_fit(payload, n, indexed=indexed)
        numbers = _numbers(n, indexed).unpack_from(payload, _FIXED.size)
        if indexed:
            indices, numbers = numbers[:n], numbers[n:]
            if indices[-1] >= self._dimensions or not all(map(lt, indices, indices[1:])):
                return False
        total = sum(numbers)
        return bool(total - total == 0)  # one that is not finite leaves a trace in the sum

    def _many_fit(self, payload: bytes, n: int, *, indexed: bool) -> bool:
        at = _FIXED.size
        if indexed:
            indices = np.frombuffer(payload, "<u2", n, at)
            at += 2 * n
            if indices[-1] >= self._dimensions or not (indices[1:] > indices[:-1]).all():
                return False
        return bool(np.isfinite(np.frombuffer(payload, "<f4", n, at)).all())


def _few(numbers: Any, kinds: str) -> list[Any] | None:
    """A few numbers as a list; None: they are many, or of another kind."""
    if numbers is None:
        return []
    plain = isinstance(numbers, np.ndarray) and numbers.ndim == 1 and len(numbers) <= WIDE
    return numbers.tolist() if plain and numbers.dtype.kind in kinds else None


def _is_id(id_: object) -> bool:
    return type(id_) is bytes and len(id_) == len(NO_ID) and id_ != NO_ID


def _plain_names(delta: Delta) -> tuple[bytes, bytes, bytes] | None:
    """The namespace, the vector_id and the padded origin, if they are plain text."""
    namespace, vector_id, origin = delta.namespace, delta.vector_id, delta.origin
    try:
        text = f"{namespace}\0{vector_id}\0{origin}".encode("ascii")
    except UnicodeEncodeError:
        return None
    parts = text.split(b"\0")
    if len(parts) != 3 or not all(parts):
        return None
    fits = (
        len(parts[0]) <= NAMESPACE_BYTES_MAX
        and len(parts[1]) <= VECTOR_ID_BYTES_MAX
        and len(parts[2]) <= ORIGIN_BYTES_MAX
        and type(namespace) is type(vector_id) is type(origin) is str
    )
    return (parts[0], parts[1], parts[2].ljust(ORIGIN_BYTES_MAX, b"\0")) if fits else None


def _names_fit(names: bytes, namespace_bytes: int, vector: bytes) -> bool:
    """They are plain text, and the vector's hash is theirs."""
    if not names.isascii() or 0 in names:
        return False
    hashed = names[:namespace_bytes] + b"\0" + names[namespace_bytes:]
    return xxhash.xxh3_128_digest(hashed) == vector


@cache  # at most as many as there may be numbers, twice
def _numbers(n: int, indexed: bool) -> struct.Struct:
    return struct.Struct(f"<{n}H{n}f" if indexed else f"<{n}f")


@cache
def plain_deltas(dimensions: int) -> PlainDeltas:
    return PlainDeltas(dimensions)
