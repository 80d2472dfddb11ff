"""One change of one vector, as people handle it: a value, and to and from its bytes.

The bytes are described in `penstock.model.delta_format`; hot paths use the columns of
`penstock.model.delta_batch` and never build a `Delta`.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from penstock.model.columns import Buffer
from penstock.model.delta_format import (
    CLOCK,
    CLOCK_ORIGINS_MAX,
    COUNTER_MAX,
    DIMENSIONS_MAX,
    HAS_INDICES,
    HAS_METADATA,
    HAS_PARENT,
    HEADER,
    LOGICAL_BITS,
    NO_ID,
    ORIGIN_BYTES_MAX,
    VERSION,
    DeltaHead,
    Op,
    PriorityClass,
    Source,
    check,
    head_of,
    metadata_of,
    refuse,
)

__all__ = [
    "Delta",
    "Op",
    "PriorityClass",
    "Source",
    "decode",
    "encode",
    "hybrid_time",
    "vector_hash",
]


class Delta(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A delta as people handle it; hot paths use the columns of `penstock.model.delta_batch`."""

    delta_id: bytes
    namespace: str
    vector_id: str
    op: Op
    origin: str
    time: int
    parent: bytes | None = None
    clock: dict[str, int] = {}
    indices: NDArray[np.uint16] | None = None
    values: NDArray[np.float32] | None = None
    metadata: dict[str, Any] | None = None
    priority: PriorityClass = PriorityClass.NORMAL
    source: Source = Source.WRITER

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Delta):
            return NotImplemented
        return all(
            _plain(getattr(self, name)) == _plain(getattr(other, name))
            for name in self.__struct_fields__
        )

    def __hash__(self) -> int:
        return hash(self.delta_id)


def _plain(value: object) -> object:
    return value.tobytes() if isinstance(value, np.ndarray) else value


def vector_hash(namespace: str, vector_id: str) -> bytes:
    """What names a vector in headers, in keys and in tables."""
    return xxhash.xxh3_128_digest(f"{namespace}\0{vector_id}".encode())


def hybrid_time(time_ms: int, logical: int = 0) -> int:
    return time_ms << LOGICAL_BITS | logical


def encode(delta: Delta, *, dimensions: int) -> bytes:
    """The payload of a delta; raises `InvalidArgument` for one that a topic would refuse."""
    values = _values(delta.values)
    indices = _indices(delta.indices, len(values))
    metadata = _encoded_metadata(delta.metadata)
    namespace, vector_id = _name(delta.namespace, "namespace"), _name(delta.vector_id, "vector_id")
    origin = _padded(delta.origin, "origin")
    flags = HAS_PARENT * (delta.parent is not None) | HAS_INDICES * (indices is not None)
    flags |= HAS_METADATA * bool(metadata)
    try:
        header = HEADER.pack(
            VERSION, delta.op, delta.priority, delta.source, len(values), len(delta.clock), flags,
            _id(delta.delta_id, "delta_id"),
            NO_ID if delta.parent is None else _id(delta.parent, "parent"),
            origin, delta.time, xxhash.xxh3_128_digest(namespace + b"\0" + vector_id),
            len(namespace), len(vector_id), len(metadata),
        )  # fmt: skip
    except struct.error as error:
        raise refuse(f"a number of the delta does not fit: {error}", "delta") from error
    parts = [header, *_clock(delta)]
    if indices is not None:
        parts.append(indices.tobytes())
    payload = b"".join([*parts, values.tobytes(), namespace, vector_id, metadata])
    check(payload, dimensions=dimensions)
    return payload


def decode(payload: Buffer, *, checked: bool = False) -> Delta:
    """The delta in a payload; raises `InvalidArgument` for bytes that are none. `checked`: a node
    has taken it, so that only its sizes are looked at."""
    if not checked:
        check(payload)
    head = head_of(payload)
    try:
        return _delta(payload, head)
    except ValueError as error:  # a name that is no text, an op that is none
        raise refuse(f"a delta cannot be read: {error}", "payload") from error


def _delta(payload: Buffer, head: DeltaHead) -> Delta:
    at = head.names_at
    indexed = head.flags & HAS_INDICES
    clock = (CLOCK.unpack_from(payload, HEADER.size + i * CLOCK.size) for i in range(head.clocks))
    return Delta(
        delta_id=head.delta_id,
        namespace=bytes(payload[at : at + head.namespace_bytes]).decode(),
        vector_id=bytes(payload[at + head.namespace_bytes : head.metadata_at]).decode(),
        op=Op(head.op),
        origin=head.origin.rstrip(b"\0").decode(),
        time=head.time,
        parent=head.parent if head.flags & HAS_PARENT else None,
        clock={origin.rstrip(b"\0").decode(): counter for origin, counter in clock},
        indices=np.frombuffer(payload, "<u2", head.n, head.indices_at).copy() if indexed else None,
        values=np.frombuffer(payload, "<f4", head.n, head.values_at).copy() if head.n else None,
        metadata=(
            metadata_of(bytes(payload[head.metadata_at :])) if head.flags & HAS_METADATA else None
        ),
        priority=PriorityClass(head.priority),
        source=Source(head.source),
    )


def _values(values: ArrayLike | None) -> NDArray[np.float32]:
    if values is None:
        return np.empty(0, "<f4")
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, which is refused
        try:
            found = np.asarray(values).astype("<f4")
        except (TypeError, ValueError) as error:
            raise refuse("values are not numbers", "values") from error
    if found.ndim != 1 or len(found) > DIMENSIONS_MAX:
        raise refuse(f"values must be one row of at most {DIMENSIONS_MAX}", "values",
                     DIMENSIONS_MAX)  # fmt: skip
    return found


def _indices(indices: ArrayLike | None, count: int) -> NDArray[np.uint16] | None:
    if indices is None:
        return None
    found = np.asarray(indices)
    if found.shape != (count,):
        raise refuse(f"{found.size} indices name {count} values", "indices", count)
    if found.size and found.dtype.kind not in "iu":
        raise refuse("indices must be integers", "indices")
    outside = (found < 0) | (found >= DIMENSIONS_MAX)
    if outside.any():
        at = int(np.argmax(outside))
        raise refuse(f"indices[{at}] is {found[at]}, must be from 0 to {DIMENSIONS_MAX - 1}",
                     f"indices[{at}]", DIMENSIONS_MAX - 1)  # fmt: skip
    return found.astype("<u2")


def _encoded_metadata(metadata: dict[str, Any] | None) -> bytes:
    if metadata is None:
        return b""
    try:
        return msgspec.msgpack.encode(metadata)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.EncodeError) as error:
        raise refuse(f"metadata cannot be encoded: {error}", "metadata") from error


def _clock(delta: Delta) -> list[bytes]:
    if delta.origin not in delta.clock:
        raise refuse(f"clock does not count the delta's own origin {delta.origin!r}", "clock")
    if len(delta.clock) > CLOCK_ORIGINS_MAX:
        raise refuse(f"a clock has {len(delta.clock)} origins, at most {CLOCK_ORIGINS_MAX}",
                     "clock", CLOCK_ORIGINS_MAX)  # fmt: skip
    entries = sorted(delta.clock.items(), key=lambda entry: (entry[0] != delta.origin, entry[0]))
    try:
        return [CLOCK.pack(_padded(origin, "clock"), count) for origin, count in entries]
    except struct.error as error:
        raise refuse(f"a clock's counter does not fit: {error}", "clock", COUNTER_MAX) from error


def _padded(origin: str, field: str) -> bytes:
    data = _name(origin, field)
    if not 1 <= len(data) <= ORIGIN_BYTES_MAX:
        raise refuse(f"{field} has {len(data)} bytes, must have 1 to {ORIGIN_BYTES_MAX}", field,
                     ORIGIN_BYTES_MAX)  # fmt: skip
    return data.ljust(ORIGIN_BYTES_MAX, b"\0")


def _name(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise refuse(f"{field} is not text", field) from error


def _id(data: bytes, field: str) -> bytes:
    if len(data) != 16:
        raise refuse(f"{field} must be 16 bytes", field, 16)
    return data


def document_of(delta: Delta) -> dict[str, Any]:
    """What a delta says; what it does not have is left out."""
    found: dict[str, Any] = {
        "delta_id": delta.delta_id.hex(),
        "parent": None if delta.parent is None else delta.parent.hex(),
        "namespace": delta.namespace,
        "vector_id": delta.vector_id,
        "op": delta.op.name.lower(),
        "origin": delta.origin,
        "clock": delta.clock,
        "time": delta.time,
        "time_ms": delta.time >> 16,
        "priority": delta.priority.name.lower(),
        "source": delta.source.name.lower(),
        "indices": None if delta.indices is None else delta.indices.tolist(),
        "values": None if delta.values is None else delta.values.tolist(),
        "metadata": delta.metadata,
    }
    return {name: value for name, value in found.items() if value is not None}
