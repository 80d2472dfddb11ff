"""Triggers made by hand, as a fold would give them out, and what became of them in a sink."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.model.columns import Binary
from penstock.model.delta import Delta, Op, PriorityClass, encode, hybrid_time
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.merge import VectorStates
from penstock.sinks.protocol import Sink, Work
from penstock.sinks.schema import deltas_table, states_table

DIMENSIONS = 4
PIPELINE = "pipeline"  # whose triggers they are
START_MS = 1_700_000_000_000
Effect = list[Any]


@dataclass(frozen=True, kw_only=True)
class State:
    vector_id: str
    revision: int
    values: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    namespace: str = "default"
    metadata: dict[str, Any] | None = None
    deleted: bool = False


def states(*rows: State, topic: str = "vectors", partition: int = 0) -> pa.Table:
    count = len(rows)
    numbers = np.array([row.revision for row in rows], np.uint64)
    values = np.array([row.values for row in rows], np.float32)
    values[[row.deleted for row in rows]] = 0
    packed = [b"" if r.metadata is None else msgspec.msgpack.encode(r.metadata) for r in rows]
    columns = VectorStates(
        number=np.arange(count),
        namespace=Binary.of([row.namespace.encode() for row in rows]),
        vector_id=Binary.of([row.vector_id.encode() for row in rows]),
        values=values,
        metadata=Binary.of(packed),
        deleted=np.array([row.deleted for row in rows]),
        revision=numbers,
        time=hybrid_time(START_MS) + numbers.astype(np.int64),
        sequence=numbers,
        log_time_ms=START_MS + numbers.astype(np.int64),
        lane=np.full(count, 2, np.uint8),
    )
    return states_table(columns, topic=topic, partition=partition)


def delta(number: int, *, vector_id: str = "a", **changed: Any) -> Delta:
    fields: dict[str, Any] = {
        "delta_id": number.to_bytes(16, "big"),
        "namespace": "default",
        "vector_id": vector_id,
        "op": Op.SPARSE,
        "origin": "writer",
        "time": hybrid_time(START_MS + number),
        "clock": {"writer": number},
        "indices": np.array([1], np.uint16),
        "values": np.array([number], np.float32),
        "priority": PriorityClass(number % 4),
    }
    return Delta(**{**fields, **changed})


def deltas(
    first: int,
    *rows: Delta,
    topic: str = "vectors",
    partition: int = 0,
    payloads: list[bytes] | None = None,
) -> pa.Table:
    """Released deltas whose ordinals, positions and sequences begin with `first`."""
    numbers = np.arange(first, first + len(rows), dtype=np.uint64)
    encoded = payloads or [encode(row, dimensions=DIMENSIONS) for row in rows]
    batch = DeltaBatch.of(
        encoded, sequences=numbers, log_times_ms=START_MS + numbers.astype(np.int64)
    )
    return deltas_table(
        batch,
        positions=numbers,
        ordinals=numbers,
        topic=topic,
        partition=partition,
        payloads=True,
    )


@dataclass(frozen=True)
class Triggers:
    """A run of triggers, handed out alone or several at once."""

    each: list[tuple[pa.Table, pa.Table]] = field(default_factory=list)
    pipeline: str = PIPELINE

    @staticmethod
    def of(count: int, *, rows: int = 3) -> Triggers:
        """In each trigger some vectors change, all of them known from before but in the first."""
        found = Triggers()
        for trigger in range(count):
            first = trigger * rows + 1
            changed = [
                State(
                    vector_id=f"v{i}",
                    revision=trigger + 1,
                    values=(trigger, i, -0.0, 1e-30),
                    metadata={"trigger": trigger} if i else None,
                )
                for i in range(rows)
            ]
            released = [delta(first + i, vector_id=f"v{i}") for i in range(rows)]
            found.each.append((states(*changed), deltas(first, *released)))
        return found

    def work(self, first: int, last: int | None = None) -> Work:
        last = first if last is None else last
        some = self.each[first : last + 1]
        newest = {  # one state per vector, as the pipeline hands them out
            (row["namespace"], row["vector_id"]): row
            for table, _ in some
            for row in table.to_pylist()
        }
        return Work(
            pipeline=self.pipeline,
            first=first,
            last=last,
            states=pa.Table.from_pylist(list(newest.values()), schema=some[0][0].schema),
            deltas=pa.concat_tables([table for _, table in some]),
        )


def work(trigger: int, table: pa.Table, *, pipeline: str = PIPELINE) -> Work:
    """Work with states alone, or deltas alone."""
    kind = "states" if "vector" in table.schema.names else "deltas"
    return Work(pipeline=pipeline, first=trigger, last=trigger, **{kind: table})


@contextmanager
def opened(sink: Sink) -> Iterator[Sink]:
    sink.open()
    try:
        yield sink
    finally:
        sink.close()


def held(sink: Sink) -> Effect:
    """What a sink with state holds: vectors as their bytes, metadata as what their JSON says."""
    found = []
    for batch in sink.scan():
        for row in batch.to_pylist():
            values = pa.array(row["vector"], pa.float32()).to_numpy().tobytes()
            name = (row["namespace"], row["vector_id"])
            metadata = None if row["metadata"] is None else json.loads(row["metadata"])
            found.append((*name, row["revision"], values, metadata))
    return sorted(found, key=lambda row: row[:3])
