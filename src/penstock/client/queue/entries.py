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
from itertools import repeat
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.client.options import Duration, milliseconds
from penstock.errors import InvalidArgument
from penstock.model.entries import BATCH_ENTRIES_MAX, HEADERS_BYTES_MAX, KEY_BYTES_MAX, RETRIES_MAX
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
    if of is bytes:
        return Content(_bytes, bytes)
    if of is str:
        return Content(
            _converter(str.encode, "a value is not Unicode text", UnicodeEncodeError, takes=str),
            _converter(bytes.decode, "a payload is not UTF-8", UnicodeDecodeError, field="payload"),
        )
    if hasattr(of, "model_validate_json") and hasattr(of, "model_dump_json"):
        wrong = f"a payload is not {of.__name__}"  # pydantic's ValidationError is a ValueError
        return Content(
            _converter(lambda value: value.model_dump_json().encode(), takes=of),
            _converter(of.model_validate_json, wrong, ValueError, field="payload"),
        )
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


def _json(of: Any) -> Content[Any]:
    try:
        decode = msgspec.json.Decoder(of).decode
    except TypeError as error:
        raise InvalidArgument(f"{of!r} cannot be a topic's type: {error}", field="of") from error
    encode, wrong = msgspec.json.Encoder().encode, f"a payload is not {of}"
    unfit = (TypeError, ValueError, OverflowError, RecursionError)
    unread = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    return Content(
        _converter(encode, "a value is not JSON", *unfit),
        _converter(decode, wrong, *unread, field="payload"),
    )


def _converter(
    convert: Callable[[Any], Any],
    wrong: str = "",
    *failures: type[Exception],
    takes: type = object,
    field: str = "value",
) -> Callable[[Any], Any]:
    """`convert` for what is of the right type; its failures are told as `wrong` arguments."""

    def converted(value: Any) -> Any:
        if not isinstance(value, takes):
            given = type(value).__name__
            raise InvalidArgument(f"this topic takes {takes.__name__}, not {given}", field=field)
        try:
            return convert(value)
        except failures as error:
            raise InvalidArgument(f"{wrong}: {error}", field=field) from error

    return converted


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


# What is put, as it is stored: the values of the columns of an ENQ body that have these defaults.
PutEntry = tuple[bytes, int, bytes, bytes, int, int]
DEFAULTS: Final[dict[str, Any]] = {
    "payload": None, "priority": 0, "key": b"", "headers": b"", "delay_ms": 0, "max_retries": -1,
}  # fmt: skip


class EntryGroup:
    """Entries that will share a request, and who waits for the message id of each."""

    __slots__ = ("bytes", "rows", "waiters")

    def __init__(self) -> None:
        self.rows: list[PutEntry] = []
        self.waiters: list[asyncio.Future[str]] = []  # none of them for `put_many`
        self.bytes = 0

    def add(self, entry: PutEntry) -> None:
        """Append one entry that was checked against the topic's limits."""
        self.rows.append(entry)
        self.bytes += len(entry[0]) + len(entry[2]) + len(entry[3]) + 16

    def fill(self, payloads: list[bytes], headers: bytes) -> None:
        """Take many payloads at once that have nothing but headers beside them."""
        empty = repeat(b"")
        self.rows = list(
            zip(payloads, repeat(0), empty, repeat(headers), repeat(0), repeat(-1), strict=False)
        )
        self.bytes = sum(map(len, payloads)) + len(payloads) * (len(headers) + 16)

    def only(self, rows: Iterable[int]) -> EntryGroup:
        some = EntryGroup()
        for row in rows:
            some.add(self.rows[row])
            some.waiters += self.waiters[row : row + 1]
        return some

    def columns(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """The columns of all rows, or of the given ones, that do not have their default."""
        entries = self.rows if rows is None else [self.rows[row] for row in rows]
        found = zip(DEFAULTS.items(), zip(*entries, strict=True), strict=True)
        return {name: c for (name, default), c in found if c.count(default) < len(c)}

    def answer(self, ids: Sequence[str]) -> None:
        for waiter, message_id in zip(self.waiters, ids, strict=True):
            if not waiter.done():
                waiter.set_result(message_id)

    def fail(self, error: BaseException) -> None:
        """For those that have no answer yet."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)


class ProducerIdentity:
    """A producer's key: one id and epoch, and for each partition its own gapless sequence. A
    partition's id has the partition as suffix, so that no key is used in two partitions."""

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


def checked(
    payload: bytes,
    *,
    priority: int,
    key: str | bytes | None,
    delay: Duration | None,
    headers: Mapping[str, Any] | None,
    max_retries: int | None,
    limit: int,
    context: bytes = b"",
) -> PutEntry:
    """An entry as it is stored; what the node would refuse is refused here. `limit` is that of the
    payload, `context` the headers of an entry that has none."""
    delay_ms = 0 if delay is None else milliseconds(delay, field="delay")
    if len(payload) > limit:
        raise _over("payload", len(payload), limit)
    if type(priority) is not int and not _is_integer(priority):
        raise _wrong("priority", "an integer", priority)
    if not -PRIORITY_MAX - 1 <= priority <= PRIORITY_MAX:
        raise InvalidArgument("priority is not a signed 64-bit integer", field="priority")
    if max_retries is not None and not _is_integer(max_retries):
        raise _wrong("max_retries", "an integer or None", max_retries)
    if max_retries is not None and not 0 <= max_retries <= RETRIES_MAX:
        raise InvalidArgument(
            f"max_retries is {max_retries}, must be from 0 to {RETRIES_MAX}, or None",
            field="max_retries",
            limit=RETRIES_MAX,
        )
    return (
        payload,
        priority,
        b"" if key is None else encode_key(key),
        context if headers is None else encode_headers(headers) or context,
        delay_ms,
        -1 if max_retries is None else max_retries,
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
) -> list[EntryGroup]:
    """The items as columns, in as many requests as the limits ask for; in one if atomic. `context`
    are the headers of items that have none."""
    encode, limit = content.encode, config.payload_bytes_max
    items = list(items)
    chunks = [entries := EntryGroup()]
    if len(items) <= BATCH_ENTRIES_MAX and Item not in set(map(type, items)):
        payloads = list(map(encode, items))
        entries.fill(payloads, context)
        if entries.bytes <= REQUEST_BYTES_MAX and max(map(len, payloads), default=0) <= limit:
            return chunks if items else []
        chunks = [entries := EntryGroup()]
    for item in items:
        if len(entries.rows) >= BATCH_ENTRIES_MAX or entries.bytes >= REQUEST_BYTES_MAX:
            if atomic:
                raise InvalidArgument(
                    f"an atomic batch has at most {BATCH_ENTRIES_MAX} entries"
                    f" and {REQUEST_BYTES_MAX} bytes",
                    field="items",
                    limit=BATCH_ENTRIES_MAX,
                )
            chunks.append(entries := EntryGroup())
        i = item if isinstance(item, Item) else Item(item)
        entries.add(
            checked(
                encode(i.value), priority=i.priority, key=i.key, delay=i.delay, headers=i.headers,
                max_retries=i.max_retries, limit=limit, context=context,
            )
        )  # fmt: skip
    return [entries for entries in chunks if entries.rows]


def _wrong(field: str, wanted: str, value: object) -> InvalidArgument:
    return InvalidArgument(f"{field} must be {wanted}, not {type(value).__name__}", field=field)


def _over(field: str, value: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"{field} is {value}, over the limit of {limit}", field=field, limit=limit
    )
