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
(`decode`, `encode`, `penstock.model.delta_checks.validate`) says what it says. Hot paths use the
columns of `penstock.model.delta_batch` and never build a `Delta`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import cache, lru_cache
from operator import lt
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

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
FEW: Final = 32  # numbers up to which a list is quicker than an array


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


_OPS, _CLASSES, _SOURCES = len(Op), len(PriorityClass), len(Source)
_WITH_METADATA: Final = (Op.CREATE, Op.DENSE, Op.METADATA)


@lru_cache
def value_counts(dimensions: int | None) -> dict[tuple[int, bool], tuple[int, int]]:
    """Least and most values by op and whether it has indices; a pair that is missing cannot be.
    Without `dimensions` they are those that any topic may have."""
    most = DIMENSIONS_MAX if dimensions is None else dimensions
    whole, some = (1 if dimensions is None else dimensions, most), (1, most)
    return {
        (Op.CREATE, False): whole, (Op.DENSE, False): whole, (Op.SPARSE, True): some,
        (Op.SCALE, False): (1, 1), (Op.OFFSET, False): whole, (Op.OFFSET, True): some,
        (Op.DELETE, False): (0, 0), (Op.METADATA, False): (0, 0),
    }  # fmt: skip


def refuse(message: str, field: str, limit: Any = None) -> InvalidArgument:
    return InvalidArgument(message, field=field, limit=limit)


class DeltaHead(NamedTuple):
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
    metadata_bytes: int
    indices_at: int  # where the parts behind the clock begin
    values_at: int
    names_at: int
    metadata_at: int


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
    (
        version, op, priority, source, n, clocks, flags, delta_id, parent, origin, time, vector,
        namespace_bytes, vector_id_bytes, metadata_bytes,
    ) = HEADER.unpack_from(payload)  # fmt: skip
    if version != VERSION:
        raise refuse(f"delta version is {version}, must be {VERSION}", "version", VERSION)
    indices_at = HEADER.size + CLOCK.size * clocks
    values_at = indices_at + (2 * n if flags & HAS_INDICES else 0)
    names_at = values_at + 4 * n
    metadata_at = names_at + namespace_bytes + vector_id_bytes
    if size != metadata_at + metadata_bytes:
        raise refuse(
            f"a delta has {size} bytes where its header says {metadata_at + metadata_bytes}",
            "payload",
        )
    return DeltaHead(
        op, priority, source, n, clocks, flags, delta_id, parent, origin, time, vector,
        namespace_bytes, metadata_bytes, indices_at, values_at, names_at, metadata_at,
    )  # fmt: skip


def _check_header(head: DeltaHead) -> None:
    for field, value, count in (
        ("op", head.op, _OPS),
        ("priority", head.priority, _CLASSES),
        ("source", head.source, _SOURCES),
    ):
        if value >= count:
            raise refuse(f"{field} is {value}, must be below {count}", field, count - 1)
    if head.flags > HAS_PARENT | HAS_INDICES | HAS_METADATA:
        raise refuse(f"unknown flags {head.flags:#x}", "flags")
    if head.delta_id == NO_ID:
        raise refuse("delta_id must not be all zeros", "delta_id")
    if (head.parent != NO_ID) != bool(head.flags & HAS_PARENT):
        raise refuse("the parent and its flag disagree", "parent")
    if head.parent == head.delta_id:
        raise refuse("a delta cannot be its own parent", "parent")


def _check_shape(head: DeltaHead, dimensions: int | None) -> None:
    op, n = head.op, head.n
    counts = value_counts(dimensions).get((op, bool(head.flags & HAS_INDICES)))
    if counts is None:
        problem = "needs" if op == Op.SPARSE else "takes no"
        raise refuse(f"{Op(op).name} {problem} indices", "indices")
    least, most = counts
    if not most and n:
        raise refuse(f"{Op(op).name} takes no values", "values", 0)
    if not least <= n <= most:
        wanted = str(most) if least == most else f"{least} to {most}"
        raise refuse(f"{Op(op).name} has {n} values, must have {wanted}", "values", most)
    if bool(head.flags & HAS_METADATA) != bool(head.metadata_bytes):
        raise refuse("the metadata and its flag disagree", "metadata")
    if head.metadata_bytes and op not in _WITH_METADATA:
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
    limit = DIMENSIONS_MAX if dimensions is None else dimensions
    if not head.n or (head.n <= FEW and _few_fit(payload, head, limit)):
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
    if indices[-1] >= limit:
        at = int(np.argmax(indices >= limit))
        raise refuse(
            f"indices[{at}] is {indices[at]}, must be below {limit}", f"indices[{at}]", limit - 1
        )


def _few_fit(payload: Buffer, head: DeltaHead, limit: int) -> bool:
    """Whether indices rise and stay below `limit`, and values are finite; if not, why is asked."""
    n, indexed = head.n, bool(head.flags & HAS_INDICES)
    numbers = _numbers(n, indexed).unpack_from(payload, head.indices_at)
    if indexed and not (numbers[n - 1] < limit and all(map(lt, numbers, numbers[1:n]))):
        return False
    total = sum(numbers)
    return bool(total - total == 0)  # one that is not finite leaves a trace in the sum


@cache
def _numbers(n: int, indexed: bool) -> struct.Struct:
    return struct.Struct(f"<{n}H{n}f" if indexed else f"<{n}f")


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
        if not data.isascii():
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


class Delta(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A delta as people handle it."""

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
    count, numbers = _few_packed(delta.indices, delta.values) or _packed(delta)
    metadata = _encoded_metadata(delta.metadata)
    namespace, vector_id = _name(delta.namespace, "namespace"), _name(delta.vector_id, "vector_id")
    origin = _padded(delta.origin, "origin")
    flags = HAS_PARENT * (delta.parent is not None) | HAS_INDICES * (delta.indices is not None)
    flags |= HAS_METADATA * bool(metadata)
    try:
        header = HEADER.pack(
            VERSION, delta.op, delta.priority, delta.source, count, len(delta.clock), flags,
            _id(delta.delta_id, "delta_id"),
            NO_ID if delta.parent is None else _id(delta.parent, "parent"),
            origin, delta.time, xxhash.xxh3_128_digest(namespace + b"\0" + vector_id),
            len(namespace), len(vector_id), len(metadata),
        )  # fmt: skip
    except struct.error as error:
        raise refuse(f"a number of the delta does not fit: {error}", "delta") from error
    payload = b"".join([header, *_clock(delta), numbers, namespace, vector_id, metadata])
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


def _few_packed(
    indices: NDArray[np.uint16] | None, values: NDArray[np.float32] | None
) -> tuple[int, bytes] | None:
    """As `_packed`, if they are a few numbers that fit; if not, that says why."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuf":
        return None
    if values.ndim != 1 or (n := len(values)) > FEW:
        return None
    try:
        if indices is None:
            return n, _numbers(n, False).pack(*values.tolist())
        if indices.shape == (n,):
            return n, _numbers(n, True).pack(*indices.tolist(), *values.tolist())
    except (AttributeError, struct.error, OverflowError):
        pass
    return None


def _packed(delta: Delta) -> tuple[int, bytes]:
    """How many values there are, and the indices and values as a payload has them."""
    values = _values(delta.values)
    indices = _indices(delta.indices, len(values))
    return len(values), (b"" if indices is None else indices.tobytes()) + values.tobytes()


def _values(values: ArrayLike | None) -> NDArray[np.float32]:
    if values is None:
        return np.empty(0, "<f4")
    try:
        found = np.asarray(values)
        if found.dtype != "<f4":
            with np.errstate(over="ignore"):  # what does not fit becomes infinite: it is refused
                found = found.astype("<f4")
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
    if np.count_nonzero(outside):
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
