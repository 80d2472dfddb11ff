"""Entries on their way to the log: gathered as columns, encoded once, sent as often as needed.

`Entries` is what puts append to. `sealed` turns it into a `Shipment`: the request and its bodies,
with the producer key (id, epoch, sequence) inside. A shipment never changes; repeating it repeats
the key, which is what makes a retry safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from penstock.client.content import Content
from penstock.client.options import milliseconds
from penstock.errors import Corruption, InvalidArgument
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.columns import Binary
from penstock.model.partitioning import partitions_of, partitions_of_deltas
from penstock.model.topic import (
    BATCH_ENTRIES_MAX,
    DELAY_MS_MAX,
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    RETRIES_MAX,
    TopicConfig,
    TopicKind,
)
from penstock.wire.answers import ids_of
from penstock.wire.messages import Enqueue, Enqueued, Part

PRIORITY_MAX: Final = (1 << 63) - 1
REQUEST_BYTES_MAX: Final = 32 << 20  # payload of one request; a frame may be larger
_ENQ: Final = SCHEMAS[Kind.ENQ]
_headers: Final = msgspec.msgpack.Encoder()


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


class Entries:
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

    def extend(self, payloads: list[bytes], headers: bytes, *, limit: int) -> bool:
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

    def only(self, rows: Iterable[int]) -> Entries:
        """Some entries by themselves."""
        some = Entries()
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


class Identity:
    """A producer's key: one id and epoch, and for each partition its own gapless sequence.

    A partition's id has the partition as suffix, so that no key is used in two partitions.
    """

    def __init__(self, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self._next = Counter[int]()

    def take(self, partition: int, count: int) -> int:
        """Reserve `count` sequences; returns the first. They start at 1."""
        first = self._next[partition] + 1
        self._next[partition] += count
        return first

    def run(self, partition: int, first: int, count: int) -> dict[str, Any]:
        """The producer columns of a body with one run."""
        return {
            "run_count": (count,),
            "run_epoch": (self.epoch,),
            "run_sequence": (first,),
            "run_producer": (b"%s.%d" % (self.name.encode(), partition),),
        }


class Shipment:
    """A request that may be sent again, byte for byte, to any node."""

    __slots__ = ("bodies", "count", "firsts", "order", "request")

    def __init__(
        self,
        request: Enqueue,
        bodies: list[bytes],
        *,
        firsts: list[int],
        count: int,
        order: list[int] | None,
    ) -> None:
        self.request, self.bodies, self.count = request, bodies, count
        self.firsts = firsts  # of each part's producer sequences
        self.order = order  # request index → the caller's index; None: the same

    @property
    def partition(self) -> int:
        """The first that it is about; whoever coordinates that one forwards the others' parts."""
        return self.request.parts[0].partition

    def keyed(self) -> Iterator[tuple[int, int, int]]:
        """Each entry's index as the caller counts, its partition and its producer sequence."""
        at = 0
        for part, first in zip(self.request.parts, self.firsts, strict=True):
            for sequence in range(first, first + part.count):
                yield at if self.order is None else self.order[at], part.partition, sequence
                at += 1

    def ids(self, answer: Enqueued) -> list[str]:
        """The message id of each entry, in the caller's order."""
        found = ids_of(answer, self.count)
        if len(found) != self.count or not all(found):
            raise Corruption("the answer to an enqueue does not name every message")
        if self.order is None:
            return found
        sorted_ids = [""] * self.count
        for at, index in enumerate(self.order):
            sorted_ids[index] = found[at]
        return sorted_ids


def sealed(
    entries: Entries,
    *,
    config: TopicConfig,
    identity: Identity,
    partition: int,
    atomic: bool = False,
    expected_sequence: int | None = None,
) -> Shipment:
    """Encode `entries`: those with a key go where it belongs, the others to `partition`."""
    count = len(entries)
    parts, bodies, firsts = [], [], []
    order: list[int] | None = None
    groups = _groups(entries, config, partition)
    if len(groups) > 1:
        order = [row for rows in groups.values() for row in rows]
    for target, rows in groups.items():
        size = len(rows)
        first = identity.take(target, size)
        columns = entries.columns(None if order is None else rows)
        columns.update(identity.run(target, first, size))
        body = _ENQ.encode(size, columns, runs=1)
        parts.append(Part(target, size, len(body)))
        bodies.append(body)
        firsts.append(first)
    request = Enqueue(config.name, parts, atomic, expected_sequence)
    return Shipment(request, bodies, firsts=firsts, count=count, order=order)


def sealed_again(
    entry: Entries, *, config: TopicConfig, identity: Identity, partition: int, sequence: int
) -> Shipment:
    """One entry of an earlier request by itself, under the key that it had there."""
    columns = entry.columns(None)
    columns.update(identity.run(partition, sequence, 1))
    body = _ENQ.encode(1, columns, runs=1)
    request = Enqueue(config.name, [Part(partition, 1, len(body))])
    return Shipment(request, [body], firsts=[sequence], count=1, order=None)


def sealed_payloads(
    payloads: Binary, *, config: TopicConfig, identity: Identity, partition: int, headers: bytes
) -> Shipment:
    """The same for payloads of one partition that lie in a column already."""
    count = len(payloads)
    columns: dict[str, Any] = {"payload": payloads}
    if headers:
        columns["headers"] = [headers] * count
    first = identity.take(partition, count)
    columns |= identity.run(partition, first, count)
    body = _ENQ.encode(count, columns, runs=1)
    request = Enqueue(config.name, [Part(partition, count, len(body))])
    return Shipment(request, [body], firsts=[first], count=count, order=None)


def apart(
    entries: Entries,
    config: TopicConfig,
    *,
    partition: int,
    node_of: Callable[[int], str | None],
) -> list[Sequence[int]]:
    """The rows that belong together because one node coordinates their partitions."""
    by_node: dict[str | None, list[int]] = {}
    for target, rows in _groups(entries, config, partition).items():
        by_node.setdefault(node_of(target), []).extend(rows)
    return [sorted(rows) for rows in by_node.values()]


def _groups(entries: Entries, config: TopicConfig, sticky: int) -> dict[int, Sequence[int]]:
    """The rows of each partition."""
    if config.partitions == 1:
        return {0: range(len(entries))}
    if config.kind is TopicKind.DELTA:
        targets = partitions_of_deltas(entries.payloads, config.partitions)
    elif entries.keys is None:
        return {sticky: range(len(entries))}
    else:
        targets = partitions_of(entries.keys, config.partitions)
        keyless = np.fromiter((not key for key in entries.keys), bool, len(entries.keys))
        targets[keyless] = sticky
    return {int(p): np.flatnonzero(targets == p).tolist() for p in np.unique(targets)}


def encode_key(key: str | bytes | None) -> bytes:
    if key is None:
        return b""
    raw = key.encode() if isinstance(key, str) else bytes(key)
    if len(raw) > KEY_BYTES_MAX:
        raise _over("key", len(raw), KEY_BYTES_MAX)
    return raw


def encode_headers(headers: Mapping[str, Any] | None) -> bytes:
    if not headers:
        return b""
    try:
        raw = _headers.encode(headers)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"headers cannot be encoded: {error}", field="headers") from error
    if len(raw) > HEADERS_BYTES_MAX:
        raise _over("headers", len(raw), HEADERS_BYTES_MAX)
    return raw


def check(payload: bytes, priority: int, *, delay_ms: int, max_retries: int, limit: int) -> None:
    """Refuse here what the node would refuse, before it shares a request with other puts."""
    if len(payload) > limit:
        raise _over("payload", len(payload), limit)
    if not -PRIORITY_MAX - 1 <= priority <= PRIORITY_MAX:
        raise InvalidArgument("priority is not a signed 64-bit integer", field="priority")
    if not 0 <= delay_ms <= DELAY_MS_MAX:
        raise _over("delay", delay_ms, DELAY_MS_MAX)
    if not -1 <= max_retries <= RETRIES_MAX:
        raise _over("max_retries", max_retries, RETRIES_MAX)


def chunked(
    items: Iterable[Any],
    content: Content[Any],
    config: TopicConfig,
    *,
    context: bytes,
    atomic: bool,
) -> list[Entries]:
    """The items as columns, in as many requests as the limits ask for; in one if atomic.

    `context` are the headers of items that have none.
    """
    encode, limit = content.encode, config.payload_bytes_max
    items = list(items)
    chunks = [entries := Entries()]
    if len(items) <= BATCH_ENTRIES_MAX and Item not in set(map(type, items)):
        payloads = list(map(encode, items))
        if entries.extend(payloads, context, limit=limit):
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
            chunks.append(entries := Entries())
        found = item if isinstance(item, Item) else Item(item)
        _add_item(entries, found, encode(found.value), context=context, limit=limit)
    return [entries for entries in chunks if len(entries)]


def _add_item(entries: Entries, item: Item, payload: bytes, *, context: bytes, limit: int) -> None:
    delay_ms = 0 if item.delay is None else milliseconds(item.delay, field="delay")
    retries = -1 if item.max_retries is None else item.max_retries
    check(payload, item.priority, delay_ms=delay_ms, max_retries=retries, limit=limit)
    entries.add(
        payload,
        item.priority,
        key=encode_key(item.key),
        headers=encode_headers(item.headers) or context,
        delay_ms=delay_ms,
        max_retries=retries,
    )


def _over(field: str, value: int, limit: int) -> InvalidArgument:
    return InvalidArgument(
        f"{field} is {value}, over the limit of {limit}", field=field, limit=limit
    )
