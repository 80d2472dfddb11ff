"""Sinks that write to topics: every delta becomes a message, each once.

A message's producer key is a function of the log: one producer per log partition, numbered by the
ordinal of the delta. The node that takes the messages recognises what it has, however the work is
cut and however often it is repeated.

`remote` appends every delta, byte for byte, to another node's delta topic, which folds the same
deltas to the same vectors, whatever its partitions are. `notify` appends one small message per
released delta to a queue topic: it says what changed and where to find it, not the values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar, Final

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, SinkRejected, Unsupported
from penstock.model.delta import Op
from penstock.model.entries import PRODUCER_ID_BYTES_MAX
from penstock.sinks.protocol import Feed, Items, TopicWriter, Work

EPOCH: Final = 1
Place = tuple[str, int]  # topic and partition of the log that the deltas come from


class _TopicSink(ABC):
    """What both kinds share. A topic is a log: nothing is read back from it and nothing undone."""

    ordered = True
    target: ClassVar[str]  # the topic that deltas of `{topic}` go to unless the options name one
    no_scan: ClassVar[str]
    no_reset: ClassVar[str]

    def __init__(
        self, name: str, *, writer: TopicWriter, topic: str | None = None, pipeline: str = ""
    ) -> None:
        self.name = name
        self._writer, self._topic = writer, topic

    def open(self) -> None:
        return  # the writer connects when it is first needed

    @abstractmethod
    def items(self, deltas: pa.Table) -> Items:
        """One message per delta."""

    def write(self, work: Work) -> None:
        if work.deltas is None or not len(work.deltas):
            return
        rejected: list[int] = []
        reasons: list[str] = []
        for place, rows in by_place(work.deltas):
            items = self.items(work.deltas.take(pa.array(rows)))
            append = partial(self._append, place, producer_id(work.pipeline, self.name, place))
            for at, reason in refused(append, items):
                rejected.append(int(rows[at]))
                reasons.append(reason)
        if rejected:
            raise SinkRejected(reasons[0], rows=sorted(rejected), table="deltas")

    def _append(self, place: Place, producer: str, items: Items) -> None:
        topic, partition = self._topic or self.target.format(topic=place[0]), place[1]
        self._writer.append(topic, producer=producer, epoch=EPOCH, items=items, partition=partition)

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        raise Unsupported(self.no_scan)

    def reset(self) -> None:
        raise Unsupported(self.no_reset)

    def close(self) -> None:
        self._writer.close()


class RemoteSink(_TopicSink):
    feed = Feed.DELTAS | Feed.PAYLOADS
    target = "{topic}"
    no_scan = "another node's topic is audited there"
    no_reset = "another node's log cannot be emptied from here"

    def items(self, deltas: pa.Table) -> Items:
        return Items(
            sequences=deltas["ordinal"].to_numpy(),
            payloads=deltas["payload"].combine_chunks(),
            headers=deltas["headers"].combine_chunks(),
        )


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What a message of a `notify` topic holds, as a msgpack map."""

    topic: str
    partition: int
    sequence: int  # of the delta in its log
    ordinal: int
    namespace: str
    vector_id: str
    op: str
    delta_id: bytes
    origin: str
    time: int


_encoder: Final = msgspec.msgpack.Encoder()
_OPS: Final = {int(op): op.name.lower() for op in Op}


class NotifySink(_TopicSink):
    """A notice has the delta's class as its priority, so that consumers of a MIN topic hear of
    urgent changes first."""

    feed = Feed.DELTAS
    target = "{topic}-changes"
    no_scan = "a queue holds notices, not vectors"
    no_reset = "what consumers were told cannot be taken back"

    def items(self, deltas: pa.Table) -> Items:
        rows = deltas.select(list(Notice.__struct_fields__)).to_pylist()
        payloads = [_encoder.encode(Notice(**row | {"op": _OPS[row["op"]]})) for row in rows]
        return Items(
            sequences=deltas["ordinal"].to_numpy(),
            payloads=pa.array(payloads, pa.binary()),
            priorities=deltas["priority"].to_numpy().astype(np.int64),
        )


def refused(append: Callable[[Items], None], items: Items) -> Iterator[tuple[int, str]]:
    """Append all items but those that are refused for what they are; yields their places.

    A node refuses a request for one bad item in it, so the halves are tried apart. What a half
    already brought in is recognised when it comes again.
    """
    waiting = [(0, len(items))]
    while waiting:
        first, end = waiting.pop()
        try:
            append(items.slice(first, end))
        except InvalidArgument as error:
            if end - first == 1:
                yield first, error.message
                continue
            half = (first + end) // 2
            waiting += [(half, end), (first, half)]


def by_place(deltas: pa.Table) -> Iterator[tuple[Place, NDArray[np.int64]]]:
    """The rows of each log partition, by ascending ordinal."""
    if not len(deltas):
        return
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
