"""One change of one vector, and the bytes that carry it as a message of a delta topic.

Version 1, little-endian, unpadded: a header of 88 bytes, then the parts whose sizes it gives.

     0  u8 version | u8 op | u8 priority | u8 source | u16 n | u8 clock entries | u8 flags
     8  delta_id 16 | 24 parent 16 (zeros: none) | 40 origin 16 (UTF-8, zero padded) | 56 i64 time
    64  vector hash 16 | 80 u16 namespace bytes | 82 u16 vector_id bytes | 84 u32 metadata bytes
    88  clock: (origin 16, u64 counter) …, the delta's own origin first
        indices: n × u16 (flag 2) | values: n × f32 | namespace | vector_id | metadata (msgpack)

`time` is hybrid: milliseconds since 1970 in the upper 48 bits, a counter in the lower 16. A clock
maps an origin to how many of its deltas *of this vector* the writer had seen, its own new one
included: the own counter numbers an origin's deltas of a vector 1, 2, 3 …

`check` is the authority on what a payload may hold; everything else that judges payloads
(`decode`, `encode`, `penstock.model.delta_checks.validate`) says what it says.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from penstock.errors import InvalidArgument
from penstock.model.columns import Buffer
from penstock.model.plain import METADATA_VALUES_MAX, fault_of

VERSION: Final = 1
DIMENSIONS_MAX: Final = 4096
PAYLOAD_BYTES_MAX: Final = 1 << 20
NAMESPACE_BYTES_MAX: Final = 255
VECTOR_ID_BYTES_MAX: Final = 512
ORIGIN_BYTES_MAX: Final = 16
CLOCK_ORIGINS_MAX: Final = 32
AHEAD_MS_MAX: Final = 5 * 60_000
LOGICAL_BITS: Final = 16  # of a hybrid time; the rest is milliseconds
TIME_MAX: Final = (1 << 62) - 1  # a fold may count on from here
COUNTER_MAX: Final = (1 << 63) - 1

HEADER: Final = struct.Struct("<BBBBHBB16s16s16sq16sHHI")
CLOCK: Final = struct.Struct("<16sQ")
HAS_PARENT: Final = 1
HAS_INDICES: Final = 2
HAS_METADATA: Final = 4
NO_ID: Final = bytes(16)


class Op(IntEnum):
    CREATE = 0  # a new vector: all components, and metadata or none
    DENSE = 1  # replace all components
    SPARSE = 2  # set the named components
    SCALE = 3  # multiply every component by one factor
    OFFSET = 4  # add to the named components, or to all
    DELETE = 5
    METADATA = 6  # replace the metadata


class PriorityClass(IntEnum):
    CRITICAL = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


class Source(IntEnum):
    WRITER = 0
    REPLICA = 1
    IMPORT = 2
    TRANSFORM = 3


def refuse(message: str, field: str, limit: Any = None) -> InvalidArgument:
    return InvalidArgument(message, field=field, limit=limit)


class DeltaHead(NamedTuple):
    version: int
    op: int
    priority: int
    source: int
    n: int
    clocks: int
    flags: int
    delta_id: bytes
    parent: bytes
    origin: bytes
    time: int
    vector: bytes
    namespace_bytes: int
    vector_id_bytes: int
    metadata_bytes: int

    @property
    def indices_at(self) -> int:
        return HEADER.size + CLOCK.size * self.clocks

    @property
    def values_at(self) -> int:
        return self.indices_at + (2 * self.n if self.flags & HAS_INDICES else 0)

    @property
    def names_at(self) -> int:
        return self.values_at + 4 * self.n

    @property
    def metadata_at(self) -> int:
        return self.names_at + self.namespace_bytes + self.vector_id_bytes


def check(payload: Buffer, *, dimensions: int | None = None, now_ms: int | None = None) -> None:
    """Raise `InvalidArgument` for the first thing wrong; bounds that are None are left out."""
    head = head_of(payload)
    _check_header(head)
    _check_shape(head, dimensions)
    _check_time(head.time, now_ms)
    _check_clock(payload, head)
    _check_numbers(payload, head, dimensions)
    _check_names(payload, head)
    if head.flags & HAS_METADATA:
        check_metadata(bytes(payload[head.metadata_at :]))


def head_of(payload: Buffer) -> DeltaHead:
    size = len(payload)
    if size > PAYLOAD_BYTES_MAX:
        raise refuse(f"a delta has {size} bytes", "payload", PAYLOAD_BYTES_MAX)
    if size < HEADER.size:
        raise refuse(f"a delta has {size} bytes, less than its header", "payload", HEADER.size)
    head = DeltaHead(*HEADER.unpack_from(payload))
    if head.version != VERSION:
        raise refuse(f"delta version is {head.version}, must be {VERSION}", "version", VERSION)
    if size != head.metadata_at + head.metadata_bytes:
        raise refuse(
            f"a delta has {size} bytes where its header says"
            f" {head.metadata_at + head.metadata_bytes}",
            "payload",
        )
    return head


def _check_header(head: DeltaHead) -> None:
    for field, value, kind in (
        ("op", head.op, Op),
        ("priority", head.priority, PriorityClass),
        ("source", head.source, Source),
    ):
        if value >= len(kind):
            raise refuse(f"{field} is {value}, must be below {len(kind)}", field, len(kind) - 1)
    if head.flags > HAS_PARENT | HAS_INDICES | HAS_METADATA:
        raise refuse(f"unknown flags {head.flags:#x}", "flags")
    if head.delta_id == NO_ID:
        raise refuse("delta_id must not be all zeros", "delta_id")
    if (head.parent != NO_ID) != bool(head.flags & HAS_PARENT):
        raise refuse("the parent and its flag disagree", "parent")
    if head.parent == head.delta_id:
        raise refuse("a delta cannot be its own parent", "parent")


def _check_shape(head: DeltaHead, dimensions: int | None) -> None:
    op, n, indexed = head.op, head.n, bool(head.flags & HAS_INDICES)
    dense = op in (Op.CREATE, Op.DENSE) or (op == Op.OFFSET and not indexed)
    limit = DIMENSIONS_MAX if dimensions is None else dimensions
    if indexed and op not in (Op.SPARSE, Op.OFFSET):
        raise refuse(f"{Op(op).name} takes no indices", "indices")
    if op == Op.SPARSE and not indexed:
        raise refuse("SPARSE needs indices", "indices")
    if dense and dimensions is not None and n != dimensions:
        raise refuse(f"{Op(op).name} has {n} values, must have {dimensions}", "values", dimensions)
    if op == Op.SCALE and n != 1:
        raise refuse(f"SCALE has {n} values, must have 1", "values", 1)
    if op in (Op.DELETE, Op.METADATA):
        if n:
            raise refuse(f"{Op(op).name} takes no values", "values", 0)
    elif not 1 <= n <= limit:
        raise refuse(f"{Op(op).name} has {n} values, must have 1 to {limit}", "values", limit)
    if bool(head.flags & HAS_METADATA) != bool(head.metadata_bytes):
        raise refuse("the metadata and its flag disagree", "metadata")
    if head.metadata_bytes and op not in (Op.CREATE, Op.DENSE, Op.METADATA):
        raise refuse(f"{Op(op).name} takes no metadata", "metadata")
    if op == Op.METADATA and not head.metadata_bytes:
        raise refuse("METADATA needs a metadata map", "metadata")


def _check_time(time: int, now_ms: int | None) -> None:
    if not 1 <= time <= TIME_MAX:
        raise refuse(f"time is {time}, must be from 1 to {TIME_MAX}", "time", TIME_MAX)
    if now_ms is not None and time >> LOGICAL_BITS > now_ms + AHEAD_MS_MAX:
        raise refuse(
            f"time is {(time >> LOGICAL_BITS) - now_ms} ms ahead, at most {AHEAD_MS_MAX} are"
            " allowed",
            "time",
            now_ms + AHEAD_MS_MAX,
        )


def _check_clock(payload: Buffer, head: DeltaHead) -> None:
    if not 1 <= head.clocks <= CLOCK_ORIGINS_MAX:
        raise refuse(
            f"a clock has {head.clocks} origins, must have 1 to {CLOCK_ORIGINS_MAX}",
            "clock",
            CLOCK_ORIGINS_MAX,
        )
    check_origin(head.origin, "origin")
    seen: set[bytes] = set()
    for i in range(head.clocks):
        origin, counter = CLOCK.unpack_from(payload, HEADER.size + i * CLOCK.size)
        if not i and origin != head.origin:
            raise refuse("a clock must begin with the delta's own origin", "clock[0]")
        if i:
            check_origin(origin, f"clock[{i}]")
        if not 1 <= counter <= COUNTER_MAX:
            raise refuse(f"clock[{i}] counts {counter}, must be at least 1", f"clock[{i}]", 1)
        if origin in seen:
            raise refuse(f"clock[{i}] names an origin twice", f"clock[{i}]")
        seen.add(origin)


def check_origin(origin: bytes, field: str) -> None:
    text = origin.rstrip(b"\0")
    if not text or b"\0" in text:
        raise refuse(
            f"{field} must have 1 to {ORIGIN_BYTES_MAX} bytes, none of them zero", field,
            ORIGIN_BYTES_MAX,
        )  # fmt: skip
    _text(text, field)


def _text(data: bytes, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise refuse(f"{field} is not UTF-8", field) from error


def _check_numbers(payload: Buffer, head: DeltaHead, dimensions: int | None) -> None:
    if not head.n:
        return
    values = np.frombuffer(payload, "<f4", head.n, head.values_at)
    finite = np.isfinite(values)
    if not finite.all():
        at = int(np.argmin(finite))
        raise refuse(f"values[{at}] is {values[at]}, must be finite", f"values[{at}]")
    if not head.flags & HAS_INDICES:
        return
    indices = np.frombuffer(payload, "<u2", head.n, head.indices_at)
    rising = indices[1:] > indices[:-1]
    if not rising.all():
        at = int(np.argmin(rising)) + 1
        raise refuse(f"indices[{at}] does not exceed the one before it", f"indices[{at}]")
    limit = DIMENSIONS_MAX if dimensions is None else dimensions
    if indices[-1] >= limit:
        at = int(np.argmax(indices >= limit))
        raise refuse(
            f"indices[{at}] is {indices[at]}, must be below {limit}", f"indices[{at}]", limit - 1
        )


def _check_names(payload: Buffer, head: DeltaHead) -> None:
    at = head.names_at
    namespace = bytes(payload[at : at + head.namespace_bytes])
    vector_id = bytes(payload[at + head.namespace_bytes : head.metadata_at])
    for field, data, limit in (
        ("namespace", namespace, NAMESPACE_BYTES_MAX),
        ("vector_id", vector_id, VECTOR_ID_BYTES_MAX),
    ):
        if not 1 <= len(data) <= limit:
            raise refuse(f"{field} has {len(data)} bytes, must have 1 to {limit}", field, limit)
        if b"\0" in data:
            raise refuse(f"{field} must not contain a zero byte", field)
        _text(data, field)
    if xxhash.xxh3_128_digest(namespace + b"\0" + vector_id) != head.vector:
        raise refuse("the vector hash is not that of namespace and vector_id", "vector")


_METADATA: Final = msgspec.msgpack.Decoder(dict[str, Any])


def check_metadata(data: bytes) -> None:
    """Refuse what is no map of plain values."""
    fault = fault_of(data, values_max=METADATA_VALUES_MAX)
    if fault is not None:
        raise refuse(
            f"metadata is not a msgpack map of plain values: {fault.text}", "metadata", fault.limit
        )


def metadata_of(data: bytes) -> dict[str, Any]:
    """The metadata in a delta, which may be older than the rule for its values."""
    try:
        return _METADATA.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
        raise refuse(f"metadata is not a msgpack map with text keys: {error}", "metadata") from None
