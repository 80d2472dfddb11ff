"""Requests that may be sent again, and the producer key that makes this safe.

A `Shipment` is a request and its bodies, with the producer key (id, epoch, sequence) inside. It
never changes; repeating it repeats the key, by which a node knows what it has written already.

A client whose producer has a lasting name takes the place of earlier clients of that name. A
partition refuses an earlier client once it has heard of the later one. So before its first put a
client has its epoch written into every partition of the topic; it does so again when the topic has
other partitions than then, and before partitions forget it, as they do with a producer that is
silent for the topic's `dedup_ms`. A client with a name of its own has nobody to succeed, and pays
nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.client.network.link import Link
from penstock.client.queue.entries import EntryColumns
from penstock.errors import Corruption
from penstock.model.columns import Binary
from penstock.model.entries import ENQ
from penstock.model.partitioning import partitions_of, partitions_of_deltas
from penstock.model.topic import TopicConfig, TopicKind
from penstock.wire.messages import Enqueue, Enqueued, Part


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
        """The producer columns of a body with one run."""
        return {
            "run_count": (count,),
            "run_epoch": (self.epoch,),
            "run_sequence": (first,),
            "run_producer": (b"%s.%d" % (self.name.encode(), partition),),
        }

    def encode(self, columns: dict[str, Any], count: int, *, partition: int, first: int) -> bytes:
        """An ENQ body of `count` entries, with this producer's sequences from `first` on."""
        columns.update(self.run(partition, first, count))
        return ENQ.encode(count, columns, runs=1)


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
        self.firsts = firsts  # the first producer sequence of each part
        self.order = order  # from an index in the request to the caller's; None: they are the same

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
        found = answer.ids(self.count)
        if len(found) != self.count or not all(found):
            raise Corruption("the answer to an enqueue does not name every message")
        if self.order is None:
            return found
        sorted_ids = [""] * self.count
        for at, index in enumerate(self.order):
            sorted_ids[index] = found[at]
        return sorted_ids


def sealed(
    entries: EntryColumns,
    *,
    config: TopicConfig,
    identity: ProducerIdentity,
    partition: int,
    atomic: bool = False,
    expected_sequence: int | None = None,
) -> Shipment:
    """Encode `entries`: those with a key go where it belongs, the others to `partition`."""
    parts, bodies, firsts = [], [], []
    order: list[int] | None = None
    groups = _groups(entries, config, partition)
    if len(groups) > 1:
        order = [row for rows in groups.values() for row in rows]
    for target, rows in groups.items():
        first = identity.take(target, len(rows))
        columns = entries.columns(None if order is None else rows)
        body = identity.encode(columns, len(rows), partition=target, first=first)
        parts.append(Part(target, len(rows), len(body)))
        bodies.append(body)
        firsts.append(first)
    request = Enqueue(config.name, parts, atomic, expected_sequence, topic_id=config.id)
    return Shipment(request, bodies, firsts=firsts, count=len(entries), order=order)


def sealed_again(
    entry: EntryColumns,
    *,
    config: TopicConfig,
    identity: ProducerIdentity,
    partition: int,
    sequence: int,
) -> Shipment:
    """One entry of an earlier request by itself, under the key that it had there."""
    body = identity.encode(entry.columns(None), 1, partition=partition, first=sequence)
    return _of_one_part(config, Part(partition, 1, len(body)), body, first=sequence)


def sealed_payloads(
    payloads: Binary,
    *,
    config: TopicConfig,
    identity: ProducerIdentity,
    partition: int,
    headers: bytes,
) -> Shipment:
    """Payloads of one partition that lie in a column already."""
    count = len(payloads)
    columns: dict[str, Any] = {"payload": payloads}
    if headers:
        columns["headers"] = [headers] * count
    first = identity.take(partition, count)
    body = identity.encode(columns, count, partition=partition, first=first)
    return _of_one_part(config, Part(partition, count, len(body)), body, first=first)


def _of_one_part(config: TopicConfig, part: Part, body: bytes, *, first: int) -> Shipment:
    request = Enqueue(config.name, [part], topic_id=config.id)
    return Shipment(request, [body], firsts=[first], count=part.count, order=None)


def apart(
    entries: EntryColumns,
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


def _groups(entries: EntryColumns, config: TopicConfig, sticky: int) -> dict[int, Sequence[int]]:
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


AGAIN: Final = 0.5  # the part of `dedup_ms` after which partitions are told again


class _Told(NamedTuple):
    topic: int  # its id
    partitions: int
    until: float  # a time of the loop


class Succession:
    """Has the partitions of a topic refuse earlier clients of a lasting producer name."""

    def __init__(self, link: Link, identity: ProducerIdentity) -> None:
        self._link, self._identity = link, identity
        self._loop = asyncio.get_running_loop()
        self._told: _Told | None = None
        self._telling = asyncio.Lock()

    def known(self, config: TopicConfig) -> bool:
        """Whether all partitions refuse earlier clients of the name, and will for a while."""
        if not self._identity.lasting:
            return True
        told = self._told
        return (
            told is not None
            and told[:2] == (config.id, config.partitions)
            and self._loop.time() < told.until
        )

    async def tell(self, config: TopicConfig) -> None:
        """Have all partitions refuse them; raises `StaleProducer` if there is a later client."""
        if self.known(config):
            return
        async with self._telling:
            if self.known(config):
                return
            until = self._loop.time() + config.dedup_ms / 1000 * AGAIN
            await self._link.call(
                "producer_begin",
                topic=config.name,
                producer=self._identity.name,
                epoch=self._identity.epoch,
            )
            self._told = _Told(config.id, config.partitions, until)
