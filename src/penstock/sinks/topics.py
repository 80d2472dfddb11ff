"""Sinks that write to topics: every delta becomes a message, each once.

A message's producer key is a function of the log: one producer per log partition, numbered by the
ordinal of the delta. The node that takes the messages recognises what it has, however the work is
cut and however often it is repeated.

`remote` appends every delta, byte for byte, to another node's delta topic, which folds the same
deltas to the same vectors, whatever its partitions are. `notify` appends one small message per
released delta to a queue topic: it says what changed and where to find it, not the values.

Deltas that could not go where they should become *letters* in a queue topic. Both kinds, dead
letters of a sink and quarantined deltas, carry the delta's payload as it was written, with its
priority class as the priority. Why they are there is told in headers, beside those that the delta
came with:

    penstock-reason     what was wrong, in words
    penstock-error      the error's code, of dead letters
    penstock-sink       the sink that refused it, of dead letters
    penstock-missing    the parent that never came (hex), of quarantined deltas
    penstock-pipeline, penstock-topic, penstock-partition, penstock-sequence: where it comes from

A letter has a producer per pipeline, purpose and source partition, so writing it again changes
nothing either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, NotFound, SinkRejected, Unsupported
from penstock.model import plain
from penstock.model.delta import DIMENSIONS_MAX, Delta, Op, PriorityClass, Source, encode
from penstock.model.entries import HEADERS_BYTES_MAX, PRODUCER_ID_BYTES_MAX
from penstock.model.plain import fault_of
from penstock.model.topic import BOUNDS
from penstock.sinks import texts
from penstock.sinks.protocol import Feed, InTasks, Items, TopicWriter, Work
from penstock.sinks.schema import vector_keys

EPOCH: Final = 1
Place = tuple[str, int]  # topic and partition of the log that the deltas come from


class QueueSink(InTasks):
    """A sink behind which is a topic: nothing is read back from it and nothing undone."""

    ordered = True
    no_scan: ClassVar[str]
    no_reset: ClassVar[str]

    def open(self) -> None:
        return  # the writer connects when it is first needed

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        raise Unsupported(self.no_scan)

    def reset(self) -> None:
        raise Unsupported(self.no_reset)

    def close(self) -> None:
        return


class _TopicSink(QueueSink, ABC):
    """One message per delta."""

    target: ClassVar[str]  # the topic that deltas of `{topic}` go to unless the options name one

    def __init__(
        self, name: str, *, writer: TopicWriter, topic: str | None = None, pipeline: str = ""
    ) -> None:
        self.name = name
        self._writer, self._topic = writer, topic

    @abstractmethod
    def items(self, deltas: pa.Table) -> Items: ...

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
            headers=headers_of(deltas),
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
_originals: Final = msgspec.msgpack.Decoder(tuple[bytes, bytes | None])
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
    """Append all items but those that are refused for what they are; yields their places. A node
    refuses a request for one bad item in it, so the halves are tried apart. What a half already
    brought in is recognised when it comes again."""
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


PREFIX: Final = "penstock-"
REASON: Final = "penstock-reason"
ERROR: Final = "penstock-error"
SINK: Final = "penstock-sink"
MISSING: Final = "penstock-missing"
TEXT_MAX: Final = 1000
_INDEXED: Final = frozenset({Op.SPARSE, Op.OFFSET})


def quarantine_topic(topic: str) -> str:
    return f"{topic}-quarantine"


def dead_letter_topic(topic: str, sink: str) -> str:
    return f"{topic}-dlq-{sink}"


def letters_config(topic: str) -> dict[str, Any]:
    """A topic for letters. It remembers producer keys for as long as it may: a letter may be
    repeated when a pipeline comes back after a long time."""
    return {"name": topic, "dedup_ms": BOUNDS["dedup_ms"][1]}


@dataclass(frozen=True, kw_only=True)
class LetterBox:
    """Where letters are posted; a topic is made when its first letter comes."""

    writer: TopicWriter
    create: Callable[[str], None]

    def post(
        self,
        deltas: pa.Table,
        *,
        to: Callable[[str], str],
        pipeline: str,
        purpose: str,
        reasons: Sequence[Mapping[str, str]],
    ) -> int:
        """Write one letter per row of `deltas` to the topic that `to` names for its source topic,
        numbered by the ordinal, each number once; `reasons` are headers of each row. Durable on
        return."""
        numbers = deltas["ordinal"].to_numpy()
        for (topic, partition), rows in by_place(deltas):
            once = rows[np.append(numbers[rows[1:]] != numbers[rows[:-1]], True)]
            part = deltas.take(pa.array(once))
            items = Items(
                sequences=part["ordinal"].to_numpy().astype(np.int64),
                payloads=payloads_of(part),
                priorities=part["priority"].to_numpy().astype(np.int64),
                headers=_headers(part, [reasons[row] for row in once], pipeline=pipeline),
            )
            producer = _producer(pipeline, purpose, topic, partition)
            self._append(to(topic), producer, items, partition)
        return int(deltas.num_rows)

    def bury(
        self,
        rejected: SinkRejected,
        *,
        work: Work,
        sink: str,
        touching: Callable[[], Iterable[pa.Table]],
    ) -> int:
        """Post what a sink can never take to its dead letters; the number of letters. A letter is a
        delta, whatever the sink is fed: a refused *state* stands for the deltas that made it, of
        all those that the work was made of (`touching`)."""
        table = work.states if rejected.table == "states" else work.deltas
        assert table is not None, f"rows of a table that the work does not have: {rejected.table}"
        deltas = table.take(pa.array(rejected.rows, pa.int64()))
        if rejected.table == "states":
            wanted = vector_keys(deltas, topics=True)
            deltas = pa.concat_tables(
                some.filter(pc.is_in(vector_keys(some, topics=True), value_set=wanted))
                for some in touching()
            )
        reason = {REASON: rejected.message, ERROR: rejected.code, SINK: sink}
        return self.post(
            deltas,
            to=lambda topic: dead_letter_topic(topic, sink),
            pipeline=work.pipeline,
            purpose=f"dlq-{sink}",
            reasons=[reason] * deltas.num_rows,
        )

    def _append(self, topic: str, producer: str, items: Items, partition: int) -> None:
        append = partial(
            self.writer.append,
            topic, producer=producer, epoch=EPOCH, items=items, partition=partition,
        )  # fmt: skip
        try:
            append()
        except NotFound:
            self.create(topic)
            append()


class QuarantineSink(QueueSink):
    """Takes deltas that a fold could not place, as `Work.deltas`, to `<topic>-quarantine`.

    A pipeline brings this sink along; it is ordered and has a cursor of its own. A partition's
    quarantined deltas are numbered like its released ones, and that numbers their letters. A delta
    that is sent to its topic again is a new message there; should it fail again, it gets a new
    number and a new letter.
    """

    name = "_quarantine"  # no configured sink can be called so
    feed = Feed.DELTAS
    no_scan = "the quarantine is a queue: it holds deltas, not vectors"
    no_reset = "the quarantine is a queue: purge its topic instead"

    def __init__(self, box: LetterBox) -> None:
        self._box = box

    def write(self, work: Work) -> None:
        if work.deltas is None:
            return
        reasons, missing = (work.deltas[name].to_pylist() for name in ("reason", "missing"))
        rows = zip(reasons, missing, strict=True)
        self._box.post(
            work.deltas,
            to=quarantine_topic,
            pipeline=work.pipeline,
            purpose="quarantine",
            reasons=[{REASON: why} | ({MISSING: one.hex()} if one else {}) for why, one in rows],
        )


def payloads_of(deltas: pa.Table) -> pa.BinaryArray:
    """The deltas' bytes; where the change file has none they are encoded again."""
    column = deltas["payload"].combine_chunks()
    if not column.null_count:
        return column
    rows = deltas.to_pylist()
    return pa.array(
        [row["payload"] or _original(row) or _encoded(row) for row in rows], pa.binary()
    )


def headers_of(deltas: pa.Table) -> pa.BinaryArray:
    """The headers that the deltas came with, to the byte."""
    packed = texts.packed_column(deltas["headers"].combine_chunks())
    originals = deltas["original"].combine_chunks()
    if originals.null_count == len(originals):
        return packed
    sent = [None if one is None else _originals.decode(one)[1] for one in originals.to_pylist()]
    return pc.if_else(originals.is_valid(), pa.array(sent, pa.binary()), packed)


def _original(row: Mapping[str, Any]) -> bytes | None:
    return None if row["original"] is None else _originals.decode(row["original"])[0]


def _encoded(row: Mapping[str, Any]) -> bytes:
    op = Op(row["op"])
    values, metadata = row["values"] or [], row["metadata"]
    delta = Delta(
        delta_id=row["delta_id"],
        parent=row["parent"],
        namespace=row["namespace"],
        vector_id=row["vector_id"],
        op=op,
        origin=row["origin"],
        time=row["time"],
        clock=msgspec.json.decode(row["clock"]),
        indices=np.array(row["indices"], np.uint16) if op in _INDEXED else None,
        values=np.array(values, np.float32) if values else None,
        metadata=texts.map_of(metadata),
        priority=PriorityClass(row["priority"]),
        source=Source(row["source"]),
    )
    dense = op in (Op.CREATE, Op.DENSE)
    return encode(delta, dimensions=len(values) if dense else DIMENSIONS_MAX)


def _producer(pipeline: str, purpose: str, topic: str, partition: int) -> str:
    name = "\0".join((pipeline, purpose, topic, str(partition)))
    return f"penstock-letters-{xxhash.xxh3_128_hexdigest(name.encode())}"


def _headers(
    part: pa.Table, reasons: Sequence[Mapping[str, str]], *, pipeline: str
) -> pa.BinaryArray:
    own = headers_of(part).to_pylist()
    rows = zip(
        own, reasons, *(part[name].to_pylist() for name in ("topic", "partition", "sequence")),
        strict=True,
    )  # fmt: skip
    encoded = []
    for given, reason, topic, partition, sequence in rows:
        told = {name: text[:TEXT_MAX] for name, text in reason.items()} | {
            f"{PREFIX}pipeline": pipeline,
            f"{PREFIX}topic": topic,
            f"{PREFIX}partition": str(partition),
            f"{PREFIX}sequence": str(sequence),
        }
        encoded.append(_fitting(given, told))
    return pa.array(encoded, pa.binary())


def _fitting(given: bytes | None, told: dict[str, str]) -> bytes:
    """Both maps in one, or only ours if a message could not carry both."""
    kept = plain.headers_of(given or b"")
    # A letter that was replayed and came back tells of this time, not of the last one.
    kept = {name: value for name, value in kept.items() if not name.startswith(PREFIX)}
    both = msgspec.msgpack.encode(kept | told)
    if len(both) <= HEADERS_BYTES_MAX and fault_of(both) is None:
        return both
    return msgspec.msgpack.encode(told | {f"{PREFIX}headers": "left out: too large"})
