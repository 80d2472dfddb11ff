"""What is put: values become payloads, and payloads with all that goes with them become columns.

The type given as `of` decides what a topic's values are in Python: `bytes` and `str` pass as they
are, a pydantic model through its own JSON, and everything else (dict, list, msgspec.Struct,
dataclass, TypedDict, …) through msgspec. What a node would refuse is refused here, before it shares
a request with other puts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.client.options import Duration, milliseconds
from penstock.errors import InvalidArgument
from penstock.model.entries import (
    BATCH_ENTRIES_MAX,
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    RETRIES_MAX,
)
from penstock.model.plain import fault_of
from penstock.model.topic import TopicConfig

PRIORITY_MAX: Final = (1 << 63) - 1
REQUEST_BYTES_MAX: Final = 32 << 20  # payload of one request; a frame may be larger
_headers: Final = msgspec.msgpack.Encoder()
T = TypeVar("T")


class Content(NamedTuple, Generic[T]):
    """`encode` and `decode` raise `InvalidArgument` on a value or payload of another kind."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


def content_of(of: Any) -> Content[Any]:
    """How values of type `of` become payloads, and back."""
    if of is bytes:
        return Content(_bytes, bytes)
    if of is str:
        return Content(_text, _untext)
    if hasattr(of, "model_validate_json") and hasattr(of, "model_dump_json"):
        return _pydantic(of)
    return _json(of)


def _bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise InvalidArgument(
        f"this topic takes bytes, not {type(value).__name__}; say of={type(value).__name__}"
        " when you open it",
        field="value",
    )


def _text(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"a value is not Unicode text: {error}", field="value") from error
    raise InvalidArgument(f"this topic takes str, not {type(value).__name__}", field="value")


def _untext(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"a payload is not UTF-8: {error}", field="payload") from error


def _json(of: Any) -> Content[Any]:
    try:
        decoder = msgspec.json.Decoder(of)
    except TypeError as error:
        raise InvalidArgument(f"{of!r} cannot be a topic's type: {error}", field="of") from error
    encoder = msgspec.json.Encoder()

    def encode(value: Any) -> bytes:
        try:
            return encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidArgument(f"a value is not JSON: {error}", field="value") from error

    def decode(payload: bytes) -> Any:
        try:
            return decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidArgument(f"a payload is not {of}: {error}", field="payload") from error

    return Content(encode, decode)


def _pydantic(of: Any) -> Content[Any]:
    def encode(value: Any) -> bytes:
        if not isinstance(value, of):
            raise InvalidArgument(
                f"this topic takes {of.__name__}, not {type(value).__name__}", field="value"
            )
        text: str = value.model_dump_json()
        return text.encode()

    def decode(payload: bytes) -> Any:
        try:
            return of.model_validate_json(payload)
        except ValueError as error:  # pydantic's ValidationError is one
            raise InvalidArgument(
                f"a payload is not {of.__name__}: {error}", field="payload"
            ) from error

    return Content(encode, decode)


@dataclass(slots=True, eq=False)
class Item:
    """A value for `put_many` with what `put` would take beside it."""

    value: Any
    _: KW_ONLY
    priority: int = 0
    key: str | bytes | None = None
    delay: Duration | None = None
    headers: Mapping[str, Any] | None = None
    max_retries: int | None = None


class PutEntry(NamedTuple):
    """What is put, as it is stored. The fields are columns of an ENQ body, with their defaults."""

    payload: bytes
    priority: int = 0
    key: bytes = b""
    headers: bytes = b""
    delay_ms: int = 0
    max_retries: int = -1  # as the topic says


class EntryColumns:
    """Entries that will share a request, and who waits for the message id of each."""

    __slots__ = ("bytes", "columns", "waiters")

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in PutEntry._fields}
        self.waiters: list[asyncio.Future[str]] = []  # none of them for `put_many`
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.columns["payload"])

    def add(self, entry: PutEntry) -> None:
        """Append one entry that was checked against the topic's limits."""
        for column, value in zip(self.columns.values(), entry, strict=True):
            column.append(value)
        self.bytes += len(entry.payload) + len(entry.key) + len(entry.headers) + 16

    def fill(self, payloads: list[bytes], entry: PutEntry) -> None:
        """Take many payloads at once that have all else in common with `entry`."""
        columns = entry._asdict()
        self.columns = {name: [value] * len(payloads) for name, value in columns.items()}
        self.columns["payload"] = payloads
        self.bytes = sum(map(len, payloads)) + len(payloads) * (len(entry.headers) + 16)

    def only(self, rows: Iterable[int]) -> EntryColumns:
        """Some entries by themselves."""
        some = EntryColumns()
        for row in rows:
            some.add(PutEntry(*(column[row] for column in self.columns.values())))
            some.waiters += self.waiters[row : row + 1]
        return some

    def present(self, rows: Sequence[int] | None) -> dict[str, Any]:
        """The columns of all rows, or of the given ones, that do not have their default."""
        columns = self.columns
        if rows is not None:
            columns = {name: [column[row] for row in rows] for name, column in columns.items()}
        defaults = PutEntry._field_defaults
        return {n: c for n, c in columns.items() if c.count(defaults.get(n)) < len(c)}

    def answer(self, ids: Sequence[str]) -> None:
        """Tell everybody the id of the message."""
        for waiter, message_id in zip(self.waiters, ids, strict=True):
            if not waiter.done():
                waiter.set_result(message_id)

    def fail(self, error: BaseException) -> None:
        """For those that have no answer yet."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)


class ProducerIdentity:
    """A producer's key: one id and epoch, and for each partition its own gapless sequence.

    A partition's id has the partition as suffix, so that no key is used in two partitions.
    """

    def __init__(self, name: str, epoch: int, *, lasting: bool = False) -> None:
        self.name, self.epoch = name, epoch
        self.lasting = lasting  # the name outlives this client: others had it, or will have it
        self._next = Counter[int]()

    def take(self, partition: int, count: int) -> int:
        """Reserve `count` sequences; returns the first. They start at 1."""
        first = self._next[partition] + 1
        self._next[partition] += count
        return first

    def run(self, partition: int, first: int, count: int) -> dict[str, Any]:
        """The columns that say whose entries those of a body are."""
        return {
            "run_count": (count,),
            "run_epoch": (self.epoch,),
            "run_sequence": (first,),
            "run_producer": (b"%s.%d" % (self.name.encode(), partition),),
        }


def encode_key(key: str | bytes | None) -> bytes:
    if key is None:
        return b""
    if not isinstance(key, str | bytes | bytearray | memoryview):
        raise _wrong("key", "text or bytes", key)
    try:
        raw = key.encode() if isinstance(key, str) else bytes(key)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"key is not Unicode text: {error}", field="key") from error
    if len(raw) > KEY_BYTES_MAX:
        raise _over("key", len(raw), KEY_BYTES_MAX)
    return raw


def check_map(headers: Mapping[str, Any] | None) -> None:
    """Refuse headers that are no map at all, to which a trace could not be added either."""
    if headers is not None and not isinstance(headers, Mapping):
        raise _wrong("headers", "a map from text to plain values", headers)


def encode_headers(headers: Mapping[str, Any] | None) -> bytes:
    """Headers as they are stored: a map of plain values (see `plain_map`), or nothing."""
    check_map(headers)
    if not headers:
        return b""
    try:
        raw = _headers.encode(headers if type(headers) is dict else dict(headers))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"headers cannot be encoded: {error}", field="headers") from error
    if len(raw) > HEADERS_BYTES_MAX:
        raise _over("headers", len(raw), HEADERS_BYTES_MAX)
    fault = fault_of(raw)
    if fault is not None:
        raise InvalidArgument(
            f"headers are not a map of plain values: {fault.text}",
            field="headers",
            limit=fault.limit,
        )
    return raw


def checked(item: Item, payload: bytes, *, limit: int, context: bytes = b"") -> PutEntry:
    """An item and its payload as they are stored; what the node would refuse is refused here.
    `limit` is that of the payload, `context` the headers of an item that has none."""
    delay_ms = 0 if item.delay is None else milliseconds(item.delay, field="delay")
    priority, retries = item.priority, item.max_retries
    if len(payload) > limit:
        raise _over("payload", len(payload), limit)
    if type(priority) is not int and not _is_integer(priority):
        raise _wrong("priority", "an integer", priority)
    if not -PRIORITY_MAX - 1 <= priority <= PRIORITY_MAX:
        raise InvalidArgument("priority is not a signed 64-bit integer", field="priority")
    if retries is not None and not _is_integer(retries):
        raise _wrong("max_retries", "an integer or None", retries)
    if retries is not None and not 0 <= retries <= RETRIES_MAX:
        raise InvalidArgument(
            f"max_retries is {retries}, must be from 0 to {RETRIES_MAX}, or None",
            field="max_retries",
            limit=RETRIES_MAX,
        )
    return PutEntry(
        payload,
        priority,
        encode_key(item.key),
        encode_headers(item.headers) or context if item.headers is not None else context,
        delay_ms,
        -1 if retries is None else retries,
    )


def _is_integer(value: object) -> bool:
    """Whether it counts as one: numbers of numpy do, and members of an IntEnum; booleans do not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def chunked(
    items: Iterable[Any],
    content: Content[Any],
    config: TopicConfig,
    *,
    context: bytes,
    atomic: bool,
) -> list[EntryColumns]:
    """The items as columns, in as many requests as the limits ask for; in one if atomic.

    `context` are the headers of items that have none.
    """
    encode, limit = content.encode, config.payload_bytes_max
    items = list(items)
    chunks = [entries := EntryColumns()]
    if len(items) <= BATCH_ENTRIES_MAX and Item not in set(map(type, items)):
        payloads = list(map(encode, items))
        entries.fill(payloads, PutEntry(b"", headers=context))
        if entries.bytes <= REQUEST_BYTES_MAX and max(map(len, payloads), default=0) <= limit:
            return chunks if items else []
        chunks = [entries := EntryColumns()]
    for item in items:
        if len(entries) >= BATCH_ENTRIES_MAX or entries.bytes >= REQUEST_BYTES_MAX:
            if atomic:
                raise InvalidArgument(
                    f"an atomic batch has at most {BATCH_ENTRIES_MAX} entries"
                    f" and {REQUEST_BYTES_MAX} bytes",
                    field="items",
                    limit=BATCH_ENTRIES_MAX,
                )
            chunks.append(entries := EntryColumns())
        found = item if isinstance(item, Item) else Item(item)
        entries.add(checked(found, encode(found.value), limit=limit, context=context))
    return [entries for entries in chunks if len(entries)]


def _wrong(field: str, wanted: str, value: object) -> InvalidArgument:
    return InvalidArgument(f"{field} must be {wanted}, not {type(value).__name__}", field=field)


def _over(field: str, value: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"{field} is {value}, over the limit of {limit}", field=field, limit=limit
    )
