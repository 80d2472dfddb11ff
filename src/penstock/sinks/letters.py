"""Deltas that could not go where they should, as messages of a queue topic.

Both kinds, dead letters of a sink and quarantined deltas, carry the delta's payload as it was
written, with its priority class as the priority. Why they are there is told in headers, beside
those that the delta came with:

    penstock-reason     what was wrong, in words
    penstock-error      the error's code, of dead letters
    penstock-sink       the sink that refused it, of dead letters
    penstock-missing    the parent that never came (hex), of quarantined deltas
    penstock-pipeline, penstock-topic, penstock-partition, penstock-sequence: where it comes from

A letter's producer key is a function of the log (one producer per pipeline, purpose and source
partition; the delta's ordinal in that partition), so writing it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import NotFound, SinkRejected, Unsupported
from penstock.model.delta import DIMENSIONS_MAX, Delta, Op, PriorityClass, Source, encode
from penstock.model.entries import HEADERS_BYTES_MAX
from penstock.model.plain import fault_of, headers_of
from penstock.model.topic import BOUNDS
from penstock.sinks.protocol import Feed, Items, TopicWriter, Work
from penstock.sinks.schema import vector_keys
from penstock.sinks.topics import EPOCH, by_place

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
        """Post what a sink can never take to its dead letters; the number of letters.

        A letter is a delta, whatever the sink is fed: a refused *state* stands for the deltas that
        made it, of all those that the work was made of (`touching`).
        """
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
        try:
            self.writer.append(
                topic, producer=producer, epoch=EPOCH, items=items, partition=partition
            )
        except NotFound:
            self.create(topic)
            self.writer.append(
                topic, producer=producer, epoch=EPOCH, items=items, partition=partition
            )


class QuarantineSink:
    """Takes deltas that a fold could not place, as `Work.deltas`, to `<topic>-quarantine`.

    A pipeline brings this sink along; it is ordered and has a cursor of its own. A partition's
    quarantined deltas are numbered like its released ones, and that numbers their letters. A delta
    that is sent to its topic again is a new message there; should it fail again, it gets a new
    number and a new letter.
    """

    name = "_quarantine"  # no configured sink can be called so
    feed = Feed.DELTAS
    ordered = True

    def __init__(self, box: LetterBox) -> None:
        self._box = box

    def open(self) -> None:
        return

    def write(self, work: Work) -> None:
        if work.deltas is None:
            return
        self._box.post(
            work.deltas,
            to=quarantine_topic,
            pipeline=work.pipeline,
            purpose="quarantine",
            reasons=list(_reasons(work.deltas)),
        )

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        raise Unsupported("the quarantine is a queue: it holds deltas, not vectors")

    def reset(self) -> None:
        raise Unsupported("the quarantine is a queue: purge its topic instead")

    def close(self) -> None:
        return


def _reasons(table: pa.Table) -> Iterator[dict[str, str]]:
    rows = zip(table["reason"].to_pylist(), table["missing"].to_pylist(), strict=True)
    for reason, missing in rows:
        yield {REASON: reason} | ({MISSING: missing.hex()} if missing else {})


def payloads_of(deltas: pa.Table) -> pa.BinaryArray:
    """The deltas' bytes; where the change file has none they are encoded again."""
    column = deltas["payload"].combine_chunks()
    if not column.null_count:
        return column
    rows = zip(column.to_pylist(), deltas.to_pylist(), strict=True)
    return pa.array([payload or _encoded(row) for payload, row in rows], pa.binary())


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
        clock=msgspec.msgpack.decode(row["clock"]),
        indices=np.array(row["indices"], np.uint16) if op in _INDEXED else None,
        values=np.array(values, np.float32) if values else None,
        metadata=msgspec.msgpack.decode(metadata) if metadata else None,
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
    own = part["headers"].to_pylist()
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
    kept = headers_of(given or b"")
    # A letter that was replayed and came back tells of this time, not of the last one.
    kept = {name: value for name, value in kept.items() if not name.startswith(PREFIX)}
    both = msgspec.msgpack.encode(kept | told)
    if len(both) <= HEADERS_BYTES_MAX and fault_of(both) is None:
        return both
    return msgspec.msgpack.encode(told | {f"{PREFIX}headers": "left out: too large"})
