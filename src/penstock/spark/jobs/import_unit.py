"""One unit of an import, in a worker of Spark: from rows to deltas in the topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from penstock.client.delta_columns import Causes, DeltaColumns, Names, encode_columns
from penstock.errors import PenstockError
from penstock.model.columns import Binary
from penstock.model.delta import Op, PriorityClass, Source
from penstock.sinks.protocol import Items
from penstock.spark.jobs.import_plan import Unit
from penstock.spark.jobs.import_rows import Named, Rows, read_rows
from penstock.spark.source.options import Connecting
from penstock.spark.source.topic_writer import NodeTopicWriter

EPOCH: Final = 1


@dataclass(frozen=True, kw_only=True)
class UnitTask:
    node: Connecting
    topic: str
    dimensions: int
    import_id: str
    unit: Unit
    named: Named
    priority: PriorityClass
    time: int  # hybrid, of the first row; the others follow in order

    @property
    def producer(self) -> str:
        return f"import-{self.import_id}-{self.unit.number}"

    @property
    def origin(self) -> bytes:
        return f"i{self.import_id[:8]}.{self.unit.number:x}".encode()


@dataclass(frozen=True, kw_only=True)
class UnitDone:
    unit: int
    rows: int = 0
    error: dict[str, Any] | None = None


def import_unit(task: UnitTask) -> UnitDone:
    """Send a unit. An error of ours is part of the answer: Spark would try again and wrap it."""
    try:
        rows = read_rows(task.unit, task.named, dimensions=task.dimensions)
        _send(task, rows)
    except PenstockError as error:
        if error.retryable:
            raise
        return UnitDone(unit=task.unit.number, error=error.to_wire())
    return UnitDone(unit=task.unit.number, rows=len(rows))


def _send(task: UnitTask, rows: Rows) -> None:
    """All rows of a unit, a namespace at a time."""
    ids = _delta_ids(task, len(rows))
    times = task.time + np.arange(len(rows), dtype=np.int64)
    spaces = np.array(rows.namespaces, object)
    writer = NodeTopicWriter(task.node.access())
    for namespace in dict.fromkeys(rows.namespaces):
        mine = np.flatnonzero(spaces == namespace)
        columns = DeltaColumns(
            vector_ids=[rows.vector_ids[row] for row in mine],
            values=rows.values[mine],
            namespace=namespace,
            op=Op.CREATE,
            priority=task.priority,
            source=Source.IMPORT,
            metadata=[rows.metadata[row] for row in mine],
        ).checked()
        names = Names.of(namespace, columns.vector_ids)
        causes = _causes(names, ids[mine], times[mine])
        every = np.arange(len(mine), dtype=np.int64)
        payloads = encode_columns(columns, names, causes, origin=task.origin, rows=every)
        items = Items(
            sequences=mine + 1,
            payloads=_array(payloads),
            priorities=np.full(len(mine), int(task.priority), np.int64),
        )
        writer.append(task.topic, producer=task.producer, epoch=EPOCH, items=items, partition=0)


def _delta_ids(task: UnitTask, count: int) -> NDArray[np.uint8]:
    """An id per row: a hash of the import and the unit, and the row's number."""
    head = xxhash.xxh3_64_intdigest(f"{task.import_id}/{task.unit.number}".encode())
    ids = np.empty((count, 2), "<u8")
    ids[:, 0] = head
    ids[:, 1] = np.arange(1, count + 1)
    return ids.view(np.uint8).reshape(count, 16)


def _causes(names: Names, ids: NDArray[np.uint8], times: NDArray[np.int64]) -> Causes:
    """Rows of one vector follow each other: counters 1, 2, 3 …, each the parent of the next."""
    count = len(ids)
    keys = np.frombuffer(b"".join(names.digests), "<u8").reshape(count, 2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: rows of a vector stay in order
    begins = np.ones(count, np.bool_)
    begins[1:] = (keys[order][1:] != keys[order][:-1]).any(axis=1)
    at = np.arange(count)
    counters = np.empty(count, np.uint64)
    counters[order] = at - np.maximum.accumulate(np.where(begins, at, 0)) + 1
    parents = np.zeros((count, 16), np.uint8)
    parents[order[~begins]] = ids[order[np.flatnonzero(~begins) - 1]]
    return Causes(delta_ids=ids, parents=parents, counters=counters, times=times)


def _array(payloads: Binary) -> pa.BinaryArray:
    buffers = [None, pa.py_buffer(payloads.offsets), pa.py_buffer(payloads.blob)]
    return pa.Array.from_buffers(pa.binary(), len(payloads), buffers)
