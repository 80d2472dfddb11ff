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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from penstock.errors import NotFound
from penstock.model.delta import Delta, Op, PriorityClass, Source, encode
from penstock.model.delta_format import DIMENSIONS_MAX
from penstock.model.topic import BOUNDS, HEADERS_BYTES_MAX
from penstock.sinks.protocol import Items, TopicWriter

PREFIX: Final = "penstock-"
REASON: Final = "penstock-reason"
ERROR: Final = "penstock-error"
SINK: Final = "penstock-sink"
MISSING: Final = "penstock-missing"
EPOCH: Final = 1
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
        numbered by the ordinal; `reasons` are headers of each row. Durable on return."""
        for topic, partition, rows in _by_partition(deltas):
            part = deltas.take(pa.array(rows))
            items = Items(
                sequences=part["ordinal"].to_numpy().astype(np.int64),
                payloads=payloads_of(part),
                priorities=part["priority"].to_numpy().astype(np.int64),
                headers=_headers(part, [reasons[row] for row in rows], pipeline=pipeline),
            )
            producer = _producer(pipeline, purpose, topic, partition)
            self._append(to(topic), producer, items, partition)
        return int(deltas.num_rows)

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


def _by_partition(deltas: pa.Table) -> Iterator[tuple[str, int, list[int]]]:
    """The rows of each source partition, in the order of their numbers, each number once."""
    topics = deltas["topic"].to_pylist()
    partitions = deltas["partition"].to_pylist()
    numbers = deltas["ordinal"].to_pylist()
    found: dict[tuple[str, int], dict[int, int]] = {}
    for row, (topic, partition) in enumerate(zip(topics, partitions, strict=True)):
        found.setdefault((topic, partition), {})[numbers[row]] = row
    for (topic, partition), rows in found.items():
        yield topic, partition, [rows[n] for n in sorted(rows)]


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
    kept = msgspec.msgpack.decode(given, type=dict[str, Any]) if given else {}
    # A letter that was replayed and came back tells of this time, not of the last one.
    kept = {name: value for name, value in kept.items() if not name.startswith(PREFIX)}
    both = msgspec.msgpack.encode(kept | told)
    if len(both) <= HEADERS_BYTES_MAX:
        return both
    return msgspec.msgpack.encode(told | {f"{PREFIX}headers": "left out: too large"})
