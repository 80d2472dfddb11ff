"""`df.write.format("penstock")` and `df.writeStream`: rows become messages, each once.

A row's producer key is made of what Spark does again in the same way: the producer is the query
(or the write) and the number of the task, the sequence counts the rows that the task sends to a
partition, and in a stream its upper half is the number of the micro-batch. So a task or a
micro-batch that runs again is recognised row by row, as long as it brings its rows in the same
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.model.partitioning import partitions_of
from penstock.model.topic import PRODUCER_ID_BYTES_MAX, TopicConfig, TopicKind
from penstock.sinks.requests import Part, Rows, delta_targets, requests
from penstock.spark.source.written import Columns, check_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.spark.source.options import WriteOptions

EPOCH: Final = 1
ROWS_BITS: Final = 32  # of a sequence; a micro-batch's number stands above
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


class Sent(WriterCommitMessage):
    """What a task wrote."""

    def __init__(self, rows: int, new: int) -> None:
        self.rows, self.new = rows, new


class TaskWriter:
    """The rows of one task, on their way."""

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

    def write(self, batches: Iterator[pa.RecordBatch]) -> Sent:
        new = self._access.enqueue_all(self._config.name, self._requests(batches))
        return Sent(self._sent.total(), new)

    def _requests(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[Part]]:
        for batch in batches:
            if batch.num_rows:
                yield from self._of(batch)

    def _of(self, batch: pa.RecordBatch) -> Iterator[list[Part]]:
        first = self._base + self._sent.total()
        columns = Columns(batch, self._config, producer=self._producer, first=first)
        targets = self._targets(columns)
        rows = Rows(
            sequences=self._number(targets),
            payloads=columns.payloads,
            priorities=columns.priorities,
            keys=columns.keys,
            headers=columns.headers,
        )
        return requests(rows, targets, producer=self._producer, epoch=EPOCH)

    def _targets(self, columns: Columns) -> NDArray[np.int64]:
        count = self._config.partitions
        if self._config.kind is TopicKind.DELTA:
            return delta_targets(columns.payloads, count)
        targets = np.full(len(columns.payloads), self._task % count, np.int64)
        if columns.keys is not None and count > 1:
            keyed = np.asarray(columns.keys.is_valid())
            given = columns.keys.drop_null().to_pylist()
            targets[keyed] = partitions_of(given, count)
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

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        task = _context().partitionId()
        return TaskWriter(self._options, producer=self._producer, task=task).write(iterator)


class PenstockStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write; the query's id, which its checkpoint keeps, is the producer."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
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
