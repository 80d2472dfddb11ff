"""Lists in answers: rows by the page, and messages of the log as rows.

The caller gives the `next` of one page as the `after` of the following one, which begins behind the
row of that name, whether the row is still there or not. A name is unique in its list and says where
a row stands in it. Rows are made as they are taken: those of later pages are not.

Messages are read from the log and told as maps, as many as an answer may hold. A list of which
several nodes have a part is merged from what each of them tells.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec
import numpy as np

from penstock.errors import NotFound
from penstock.model.columns import Columns
from penstock.model.entries import DELIVERY
from penstock.model.ids import PARTITIONS_MAX, MessageId
from penstock.model.plain import UNREADABLE, headers_of
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic
from penstock.wire.messages import ANSWER_BYTES_MAX, PAGE_BYTES_MAX

# Partitions that one page tells of, where their rows are made before their sizes are known. A
# topic has no more, so a page always holds a whole one.
PAGE_PARTITIONS_MAX: Final = PARTITIONS_MAX
# What a message takes in an answer besides key, headers and payload: its id, its token, numbers.
ROW_BYTES: Final = 256
UNSEEN_PART: Final = 16
Keyed = tuple[Any, Any]  # a row behind what it is in order by


class Page:
    """What an answer holds of a list: `bytes_max` of packed rows, or one row that is larger."""

    def __init__(self, bytes_max: int | None = None) -> None:
        self.rows: list[Any] = []
        self._left = PAGE_BYTES_MAX if bytes_max is None else bytes_max
        self._last = ""
        self.more = False  # there are rows behind those of the page

    def take(self, name: str, row: Any) -> bool:
        """Whether the row of that name is in the page; the first one is in any case."""
        size = len(msgspec.msgpack.encode(row))
        if self.rows and size > self._left:
            self.more = True
            return False
        self.rows.append(row)
        self._left -= size
        self._last = name
        return True

    @property
    def next(self) -> str | None:
        """The `after` of the next page; None: this was the last."""
        return self._last if self.more else None

    def told(self, rows: str) -> dict[str, Any]:
        return {rows: self.rows, "next": self.next}


def page_of(
    rows: Iterable[tuple[str, Any]], *, more: bool = False, bytes_max: int | None = None
) -> Page:
    """A page of rows with their names, in order. `more`: there are others behind them."""
    page = Page(bytes_max)
    for name, row in rows:
        if not page.take(name, row):
            return page
    page.more = more
    return page


def topics_behind(topics: Mapping[str, ServedTopic], after: str) -> tuple[list[ServedTopic], bool]:
    """The first topics by name that one page may tell of; and whether there are others."""
    names = sorted(name for name in topics if name > after)
    chosen: list[ServedTopic] = []
    partitions = 0
    for name in names:
        partitions += len(topics[name].partitions)
        if chosen and partitions > PAGE_PARTITIONS_MAX:
            break
        chosen.append(topics[name])
    return chosen, len(chosen) < len(names)


def locate(topic: ServedTopic, message_id: str) -> tuple[int, int]:
    place = MessageId.parse(message_id)
    if place.topic != topic.config.id or place.partition >= len(topic.partitions):
        raise NotFound(f"no message {message_id} in this topic", message_id=message_id)
    return place.partition, place.sequence


def known_in_order(lists: Sequence[tuple[Sequence[Keyed], bool]]) -> tuple[list[Keyed], bool]:
    """The rows of several nodes by their keys, each node's being in order and perhaps cut; and
    whether one is. All ends where one ends that was cut: what comes next in that is not known, and
    might come before what is next in the others."""
    ends = [rows[-1][0] for rows, cut in lists if cut and rows]
    merged = heapq.merge(*(rows for rows, _ in lists), key=itemgetter(0))
    return [row for row in merged if not ends or row[0] <= min(ends)], bool(ends)


def merged_lists(
    lists: Iterable[tuple[list[tuple[int, int]], dict[str, Any]]], topic: ServedTopic, limit: int
) -> tuple[list[dict[str, Any]], bool]:
    """The first messages of what nodes tell, as many as an answer may hold; and whether there are
    more. With each result come the keys of its messages, by which the whole list is in order. It
    was cut if its node `found` more than its answer has room for."""
    told = [
        (list(zip(keys, r["messages"], strict=False)), len(r["messages"]) < r.get("found", 0))
        for keys, r in lists
    ]
    rows, cut = known_in_order(told)
    allowance = Allowance(topic, limit)
    found: list[dict[str, Any]] = []
    for _, row in rows:
        if len(found) == limit or not allowance.take(size_of(row)):
            return found, True
        found.append(row)
    return found, cut


def size_of(row: dict[str, Any]) -> int:
    headers = row["headers"]
    packed = len(msgspec.msgpack.encode(headers)) if headers else 0
    return ROW_BYTES + len(row["payload"]) + len(row["key"]) + packed + len(row.get("detail", ""))


class Allowance:
    """What an answer may hold: so many messages, and `ANSWER_BYTES_MAX` of them.

    The sizes of messages are not known before they are read. So they are taken in steps: first as
    many as fit if they are as large as those of the topic's last answer, or if there was none, a
    `UNSEEN_PART` of what they may be at most; then as many as fit if they are as large as the ones
    before.
    """

    def __init__(self, topic: ServedTopic, limit: int) -> None:
        self._topic, self._left, self._limit = topic, ANSWER_BYTES_MAX, limit
        self._each = topic.message_bytes or (
            topic.config.payload_bytes_max // UNSEEN_PART + ROW_BYTES
        )
        self._count = 0

    def step(self) -> int:
        """How many may be taken next; 0: the answer is full."""
        fitting = self._left // self._each
        return min(self._limit - self._count, fitting if self._count else max(1, fitting))

    def take(self, size: int) -> bool:
        """Whether a message of that many bytes is in the answer; the first one is in any case."""
        if self._count and size > self._left:
            self._left = 0
            return False
        self._left -= size
        self._count += 1
        self._each = self._topic.message_bytes = max(
            1, (ANSWER_BYTES_MAX - self._left) // self._count
        )
        return True


async def read_messages(
    topic: ServedTopic, places: list[tuple[Partition, int]], *, besides: int = 0
) -> list[dict[str, Any]]:
    """Messages as asked for, as many as an answer may hold with `besides` bytes for each."""
    allowance = Allowance(topic, len(places))
    found: list[dict[str, Any]] = []
    while (step := allowance.step()) > 0:
        for row in await _read_step(topic, places[len(found) : len(found) + step]):
            if not allowance.take(size_of(row) + besides):
                return found
            found.append(row)
    return found


async def _read_step(
    topic: ServedTopic, places: list[tuple[Partition, int]]
) -> list[dict[str, Any]]:
    by_partition: dict[Partition, list[int]] = {}
    for partition, sequence in places:
        by_partition.setdefault(partition, []).append(sequence)
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for partition, sequences in by_partition.items():
        rows = await asyncio.to_thread(partition.reader.load, sequences)
        assert rows is not None
        attempts = partition.heap.attempts(np.array(sequences, np.uint64))
        columns = DELIVERY.decode(rows.encode(attempts), len(sequences))
        faults = rows.faults()
        for at, row in enumerate(messages_in(topic, partition.index, columns)):
            if at in faults:
                row["headers"] = {UNREADABLE: faults[at]}
            found[partition.index, row["sequence"]] = row
    return [found[partition.index, sequence] for partition, sequence in places]


def messages_in(topic: ServedTopic, partition: int, columns: Columns) -> Iterable[dict[str, Any]]:
    payloads = columns.binary("payload")
    keys, headers = columns.binary("key"), columns.binary("headers")
    for i, sequence in enumerate(columns.fixed("message").tolist()):
        time_ms = int(columns.fixed("time_ms")[i])
        packed = b"" if headers is None else headers[i]
        yield {
            "message_id": str(MessageId(time_ms, topic.config.id, partition, sequence)),
            "partition": partition,
            "sequence": sequence,
            "priority": int(columns.fixed("priority")[i]),
            "attempts": int(columns.fixed("attempts")[i]),
            "time_ms": time_ms,
            "key": b"" if keys is None else keys[i],
            "headers": headers_of(packed),
            "payload": b"" if payloads is None else payloads[i],
        }
