"""What is put: values become payloads, and payloads with all that goes with them become columns.

The type given as `of` decides what a topic's values are in Python: `bytes` and `str` pass as they
are, a pydantic model through its own JSON, and everything else (dict, list, msgspec.Struct,
dataclass, TypedDict, …) through msgspec. What a node would refuse is refused here, before it shares
a request with other puts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.client.options import milliseconds
from penstock.errors import InvalidArgument
from penstock.model.entries import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
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
        return Content(_bytes, _same)
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


def _same(payload: bytes) -> bytes:
    return payload


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


class Item:
    """A value for `put_many` with what `put` would take beside it."""

    __slots__ = ("delay", "headers", "key", "max_retries", "priority", "value")

    def __init__(
        self,
        value: Any,
        *,
        priority: int = 0,
        key: str | bytes | None = None,
        delay: Any = None,
        headers: Mapping[str, Any] | None = None,
        max_retries: int | None = None,
    ) -> None:
        self.value, self.priority, self.key = value, priority, key
        self.delay, self.headers, self.max_retries = delay, headers, max_retries


class EntryColumns:
    """Columns under construction. A column stays None until an entry differs from its default."""

    __slots__ = ("bytes", "delays", "headers", "keys", "payloads", "priorities", "retries")

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.priorities: list[int] = []
        self.keys: list[bytes] | None = None
        self.headers: list[bytes] | None = None
        self.delays: list[int] | None = None
        self.retries: list[int] | None = None
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.payloads)

    def add(
        self,
        payload: bytes,
        priority: int,
        *,
        key: bytes = b"",
        headers: bytes = b"",
        delay_ms: int = 0,
        max_retries: int = -1,
    ) -> None:
        """Append one entry that was checked against the topic's limits."""
        if key or self.keys is not None:
            self.keys = _put(self.keys, len(self.payloads), key, b"")
        if headers or self.headers is not None:
            self.headers = _put(self.headers, len(self.payloads), headers, b"")
        if delay_ms or self.delays is not None:
            self.delays = _put(self.delays, len(self.payloads), delay_ms, 0)
        if max_retries >= 0 or self.retries is not None:
            self.retries = _put(self.retries, len(self.payloads), max_retries, -1)
        self.payloads.append(payload)
        self.priorities.append(priority)
        self.bytes += len(payload) + len(key) + len(headers) + 16

    def fill(self, payloads: list[bytes], headers: bytes, *, limit: int) -> bool:
        """Take many plain payloads at once, unless they are too large for that."""
        sizes = list(map(len, payloads))
        total = sum(sizes) + len(payloads) * (len(headers) + 16)
        if total > REQUEST_BYTES_MAX or max(sizes, default=0) > limit:
            return False
        self.payloads = payloads
        self.priorities = [0] * len(payloads)
        self.headers = [headers] * len(payloads) if headers else None
        self.bytes = total
        return True

    def only(self, rows: Iterable[int]) -> EntryColumns:
        """Some entries by themselves."""
        some = EntryColumns()
        for row in rows:
            some.add(
                self.payloads[row],
                self.priorities[row],
                key=self.keys[row] if self.keys else b"",
                headers=self.headers[row] if self.headers else b"",
                delay_ms=self.delays[row] if self.delays else 0,
                max_retries=self.retries[row] if self.retries else -1,
            )
        return some

    def columns(self, rows: Sequence[int] | None) -> dict[str, Any]:
        """The ENQ columns of all rows, or of the given ones."""
        priorities = self.priorities if any(self.priorities) else None
        named = {
            "priority": priorities,
            "delay_ms": self.delays,
            "max_retries": self.retries,
            "key": self.keys,
            "headers": self.headers,
            "payload": self.payloads,
        }
        if rows is None:
            return named
        return {n: c if c is None else [c[i] for i in rows] for n, c in named.items()}


def _put(column: list[Any] | None, length: int, value: Any, default: Any) -> list[Any]:
    if column is None:
        column = [default] * length
    column.append(value)
    return column


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


def check(
    payload: bytes, priority: int, *, delay_ms: int, max_retries: int | None, limit: int
) -> int:
    """Refuse here what the node would refuse, before it shares a request with other puts. Returns
    the retries as they are stored: -1 stands for the topic's default."""
    if len(payload) > limit:
        raise _over("payload", len(payload), limit)
    if type(priority) is not int and not _is_integer(priority):
        raise _wrong("priority", "an integer", priority)
    if not -PRIORITY_MAX - 1 <= priority <= PRIORITY_MAX:
        raise InvalidArgument("priority is not a signed 64-bit integer", field="priority")
    if not 0 <= delay_ms <= DELAY_MS_MAX:
        raise _over("delay", delay_ms, DELAY_MS_MAX)
    if max_retries is None:
        return -1
    if type(max_retries) is not int and not _is_integer(max_retries):
        raise _wrong("max_retries", "an integer or None", max_retries)
    if not 0 <= max_retries <= RETRIES_MAX:
        raise InvalidArgument(
            f"max_retries is {max_retries}, must be from 0 to {RETRIES_MAX}, or None",
            field="max_retries",
            limit=RETRIES_MAX,
        )
    return max_retries


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
        if entries.fill(payloads, context, limit=limit):
            return chunks if items else []
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
        _add_item(entries, found, encode(found.value), context=context, limit=limit)
    return [entries for entries in chunks if len(entries)]


def _add_item(
    entries: EntryColumns, item: Item, payload: bytes, *, context: bytes, limit: int
) -> None:
    delay_ms = 0 if item.delay is None else milliseconds(item.delay, field="delay")
    retries = check(
        payload, item.priority, delay_ms=delay_ms, max_retries=item.max_retries, limit=limit
    )
    entries.add(
        payload,
        item.priority,
        key=encode_key(item.key),
        headers=encode_headers(item.headers) or context,
        delay_ms=delay_ms,
        max_retries=retries,
    )


def _wrong(field: str, wanted: str, value: object) -> InvalidArgument:
    return InvalidArgument(f"{field} must be {wanted}, not {type(value).__name__}", field=field)


def _over(field: str, value: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"{field} is {value}, over the limit of {limit}", field=field, limit=limit
    )
