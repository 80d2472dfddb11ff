"""`df.write.format("penstock")` and `df.writeStream`: rows become messages, each once.

A DataFrame has either `value` with priority, key and headers beside it, or the columns of deltas as
`mode=deltas` reads them: then each row becomes the payload of one delta.

A row's producer key is made of what Spark does again in the same way: the producer is the query
(or the write) and the number of the task, the sequence counts the rows that the task sends to a
partition, and in a stream its upper half is the number of the micro-batch. So a task or a
micro-batch that runs again is recognised row by row, as long as it brings its rows in the same
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.model.delta import Delta, Op, PriorityClass, Source, encode
from penstock.model.entries import PRODUCER_ID_BYTES_MAX
from penstock.model.partitioning import partitions_of
from penstock.model.topic import TopicConfig, TopicKind
from penstock.sinks.protocol import Items
from penstock.sinks.requests import Part, delta_targets, requests

if TYPE_CHECKING:
    from penstock.spark.source.options import WriteOptions

_TEXT: Final = ("binary", "string")
_WHOLE: Final = ("bigint", "int", "smallint", "tinyint")
_MAP: Final = ("map<string,string>",)
# Each column with the types that it may have, in Spark's words.
MESSAGE: Final[dict[str, tuple[str, ...]]] = {
    "value": _TEXT,
    "priority": _WHOLE,
    "key": _TEXT,
    "headers": _MAP,
}
DELTA: Final[dict[str, tuple[str, ...]]] = {
    "namespace": ("string",),
    "vector_id": ("string",),
    "op": ("string",),
    "origin": ("string",),
    "delta_time": ("bigint",),
    "delta_id": ("binary",),
    "parent": ("binary",),
    "clock": ("map<string,bigint>",),
    "indices": ("array<int>",),
    "values": ("array<float>",),
    "metadata": ("string",),
    "priority": _WHOLE,
    "source": ("string",),
    "headers": _MAP,
}
DELTA_NEEDED: Final = ("namespace", "vector_id", "op", "origin", "delta_time")


def check_schema(schema: StructType) -> None:
    """Refuse a DataFrame that is neither messages nor deltas."""
    given = {field.name: field.dataType.simpleString() for field in schema}
    allowed, needed = (MESSAGE, ()) if "value" in given else (DELTA, DELTA_NEEDED)
    for name in needed:
        if name not in given:
            raise InvalidArgument(
                f"write a column value, or a delta's {', '.join(needed)}: {name} is missing",
                field=name,
            )
    for name, kind in given.items():
        if kind not in allowed.get(name, ()):
            known = ", ".join(f"{n} {' or '.join(kinds)}" for n, kinds in allowed.items())
            raise InvalidArgument(
                f"no column {name} {kind} is written: there are {known}", field=name
            )


def items_of(batch: pa.RecordBatch, config: TopicConfig, *, producer: str, first: int) -> Items:
    """The rows of a record batch as messages, not numbered yet; `first` rows went before."""
    given = dict(zip(batch.schema.names, batch.columns, strict=True))
    value, key, priority = (given.get(name) for name in ("value", "key", "priority"))
    if value is not None and value.null_count:
        raise InvalidArgument("value is null in some row", field="value")
    headers = None
    if "headers" in given:
        rows = given["headers"].to_pylist()
        headers = pa.array([_headers(tuple(row)) if row else None for row in rows], pa.binary())
    return Items(
        sequences=np.zeros(batch.num_rows, np.int64),
        payloads=_encoded(batch, config, producer=producer, first=first)
        if value is None
        else value.cast(pa.binary()),
        priorities=None
        if priority is None
        else np.asarray(pc.fill_null(priority.cast(pa.int64()), 0)),
        keys=None if key is None or config.kind is not TopicKind.QUEUE else key.cast(pa.binary()),
        headers=headers,
    )


@lru_cache(maxsize=4096)
def _headers(pairs: tuple[tuple[str, str], ...]) -> bytes:
    return msgspec.msgpack.encode(dict(pairs))


def _encoded(
    batch: pa.RecordBatch, config: TopicConfig, *, producer: str, first: int
) -> pa.BinaryArray:
    if config.kind is not TopicKind.DELTA:
        raise InvalidArgument(
            f"{config.name} is no delta topic: write a column value", field="topic"
        )
    payloads = [
        encode(_delta(row, f"{producer}:{number}"), dimensions=config.dimensions)
        for number, row in enumerate(batch.to_pylist(), first)
    ]
    return pa.array(payloads, pa.binary())


def _delta(row: dict[str, Any], seed: str) -> Delta:
    """A row's delta. Without an id it gets one that its place in the write implies; without a
    clock it is the first of its vector from its origin."""
    origin = row["origin"]
    priority, source = row.get("priority"), row.get("source")
    clock = dict(row.get("clock") or ()) or {origin: 1}
    metadata = row.get("metadata")
    return Delta(
        delta_id=row.get("delta_id") or xxhash.xxh3_128_digest(seed.encode()),
        namespace=row["namespace"],
        vector_id=row["vector_id"],
        op=_named(Op, row["op"], "op"),
        origin=origin,
        time=row["delta_time"],
        parent=row.get("parent"),
        clock=clock,
        indices=row.get("indices"),
        values=row.get("values") or None,
        metadata=None if metadata is None else msgspec.json.decode(metadata, type=dict[str, Any]),
        priority=PriorityClass.NORMAL if priority is None else PriorityClass(priority),
        source=Source.TRANSFORM if source is None else _named(Source, source, "source"),
    )


def _named(kind: Any, name: str, field: str) -> Any:
    try:
        return kind[name.upper()]
    except (KeyError, AttributeError) as error:
        words = [member.name.lower() for member in kind]
        raise InvalidArgument(
            f"{field} is one of {', '.join(words)}, not {name}", field=field, limit=words
        ) from error


EPOCH: Final = 1
ROWS_BITS: Final = 32  # of a sequence; a micro-batch's number stands above
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


class RowsSent(WriterCommitMessage):
    def __init__(self, rows: int, new: int) -> None:
        self.rows, self.new = rows, new


class TaskWriter:
    def __init__(self, options: WriteOptions, *, producer: str, task: int, base: int = 0) -> None:
        self._access = options.node.access()
        self._config: TopicConfig = self._access.config(options.topic)
        self._producer = f"{producer}/{task}"
        if len(self._producer.encode()) > PRODUCER_ID_BYTES_MAX:
            raise InvalidArgument(
                "producer is too long", field="producer", limit=PRODUCER_ID_BYTES_MAX - 8
            )
        self._task, self._base = task, base
        self._sent = Counter[int]()  # rows by partition

    def write(self, batches: Iterator[pa.RecordBatch]) -> RowsSent:
        new = self._access.enqueue_all(self._config.name, self._requests(batches))
        return RowsSent(self._sent.total(), new)

    def _requests(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[Part]]:
        for batch in batches:
            if batch.num_rows:
                yield from self._of(batch)

    def _of(self, batch: pa.RecordBatch) -> Iterator[list[Part]]:
        first = self._base + self._sent.total()
        items = items_of(batch, self._config, producer=self._producer, first=first)
        targets = self._targets(items)
        items = replace(items, sequences=self._number(targets))
        return requests(items, targets, producer=self._producer, epoch=EPOCH)

    def _targets(self, items: Items) -> NDArray[np.int64]:
        count = self._config.partitions
        if self._config.kind is TopicKind.DELTA:
            return delta_targets(items.payloads, count)
        targets = np.full(len(items), self._task % count, np.int64)
        if items.keys is not None and count > 1:
            keyed = np.asarray(items.keys.is_valid())
            targets[keyed] = partitions_of(items.keys.drop_null().to_pylist(), count)
        return targets

    def _number(self, targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences of the rows: they count on for each partition."""
        numbers = np.empty(len(targets), np.int64)
        for target in np.unique(targets).tolist():
            own = np.flatnonzero(targets == target)
            numbers[own] = np.arange(len(own)) + self._base + self._sent[target] + 1
            self._sent[target] += len(own)
        return numbers


class PenstockWriter(DataSourceArrowWriter):
    """A batch write. `producer` names it: writing the same again under that name adds nothing."""

    def __init__(self, options: WriteOptions, schema: StructType, *, producer: str) -> None:
        check_schema(schema)
        self._options, self._producer = options, producer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsSent:
        task = _context().partitionId()
        return TaskWriter(self._options, producer=self._producer, task=task).write(iterator)


class PenstockStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write; the query's id, which its checkpoint keeps, is the producer."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RowsSent:
        context = _context()
        query, number = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if query is None or number is None:
            raise FailedPrecondition("Spark does not say which micro-batch this is")
        writer = TaskWriter(
            self._options,
            producer=self._options.producer or query,
            task=context.partitionId(),
            base=int(number) << ROWS_BITS,
        )
        return writer.write(iterator)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise FailedPrecondition("a writer runs in Spark's tasks")
    return context
