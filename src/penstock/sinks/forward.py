"""Deltas as messages of a topic, each once.

A message's producer key is a function of the log: one producer per log partition, numbered by the
ordinal of the delta. The node that takes the messages recognises what it has, however the work is
cut and however often it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, SinkRejected
from penstock.model.topic import PRODUCER_ID_BYTES_MAX
from penstock.sinks.protocol import Items, TopicWriter, Work

EPOCH: Final = 1
Place = tuple[str, int]  # topic and partition of the log that the deltas come from


class Forwarder:
    """Takes a sink's deltas to a topic; `items` makes messages of rows, `topic` names it."""

    def __init__(
        self,
        sink: str,
        writer: TopicWriter,
        *,
        topic: Callable[[str], str],
        items: Callable[[pa.Table], Items],
    ) -> None:
        self._sink, self._writer, self._topic, self._items = sink, writer, topic, items

    def forward(self, work: Work) -> None:
        if work.deltas is None or not len(work.deltas):
            return
        rejected: list[int] = []
        reasons: list[str] = []
        for place, rows in by_place(work.deltas):
            items = self._items(work.deltas.take(pa.array(rows)))
            append = partial(self._append, place, producer_id(work.pipeline, self._sink, place))
            for at, reason in refused(append, items):
                rejected.append(int(rows[at]))
                reasons.append(reason)
        if rejected:
            raise SinkRejected(reasons[0], rows=sorted(rejected), table="deltas")

    def _append(self, place: Place, producer: str, items: Items) -> None:
        topic, partition = self._topic(place[0]), place[1]
        self._writer.append(topic, producer=producer, epoch=EPOCH, items=items, partition=partition)


def refused(append: Callable[[Items], None], items: Items) -> Iterator[tuple[int, str]]:
    """Append all items but those that are refused for what they are; yields their places.

    A node refuses a request for one bad item in it, so the halves are tried apart. What a half
    already brought in is recognised when it comes again.
    """
    waiting = [(0, len(items))]
    while waiting:
        first, count = waiting.pop()
        try:
            append(items.slice(first, count))
        except InvalidArgument as error:
            if count == 1:
                yield first, error.message
                continue
            half = count // 2
            waiting.append((first + half, count - half))
            waiting.append((first, half))


def by_place(deltas: pa.Table) -> Iterator[tuple[Place, NDArray[np.int64]]]:
    """The rows of each log partition, by ascending ordinal."""
    topics = deltas["topic"].combine_chunks().dictionary_encode()
    partitions = deltas["partition"].to_numpy().astype(np.int64)
    ordinals = deltas["ordinal"].to_numpy()
    places = topics.indices.to_numpy(zero_copy_only=False).astype(np.int64) << 32 | partitions
    order = np.lexsort((ordinals, places))
    cuts = np.flatnonzero(np.diff(places[order])) + 1
    for rows in np.split(order, cuts):
        place = int(places[rows[0]])
        yield (topics.dictionary[place >> 32].as_py(), place & 0xFFFFFFFF), rows


def producer_id(pipeline: str, sink: str, place: Place) -> str:
    """The same for the same log partition; readable as long as it fits."""
    name = f"{pipeline}/{sink}/{place[0]}/{place[1]}"
    if len(name.encode()) <= PRODUCER_ID_BYTES_MAX - 16:  # room for a partition's suffix
        return name
    return f"sink-{xxhash.xxh3_128_hexdigest(name.encode())}"
