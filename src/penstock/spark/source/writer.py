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
from collections.abc import Iterable, Iterator
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

from penstock.client.delta.writer import Causes, DeltaColumns, Ids, Names, encode_columns
from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.model.delta import (
    NO_ID,
    ORIGIN_BYTES_MAX,
    TIME_MAX,
    PriorityClass,
    Source,
)
from penstock.model.delta_batch import CLOCK_DTYPE, DeltaBatch
from penstock.model.delta_checks import validate
from penstock.model.entries import PRODUCER_ID_BYTES_MAX
from penstock.model.ids import partitions_of
from penstock.model.topic import TopicConfig, TopicKind
from penstock.sinks import arrays
from penstock.sinks.protocol import Items, Part, binary, delta_targets, requests
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.rows import DELTAS, OPS, SOURCES

if TYPE_CHECKING:
    from penstock.spark.source.options import WriteOptions

_TEXT: Final = ("binary", "string")
_WHOLE: Final = ("bigint", "int", "smallint", "tinyint")
_MAP: Final = ("map<string,string>", "map<string,binary>")
# Each column with the types that it may have, in Spark's words.
MESSAGE: Final[dict[str, tuple[str, ...]]] = {
    "value": _TEXT,
    "priority": _WHOLE,
    "key": _TEXT,
    "headers": _MAP,
}
# What a read of deltas gives can be written again, but for where it stood in the log.
DELTA: Final[dict[str, tuple[str, ...]]] = {
    name: (column.type,)
    for name, column in DELTAS.items()
    if name not in ("topic", "partition", "sequence", "time")
} | {"priority": _WHOLE, "headers": _MAP}
_MAPS: Final = msgspec.json.Decoder(dict[str, Any])
_MIXING: Final = tuple(
    (np.uint64(shift), np.uint64(factor))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
DELTA_NEEDED: Final = ("namespace", "vector_id", "op", "origin", "delta_time")


def check_schema(schema: StructType, *, routed: bool) -> None:
    """Refuse a DataFrame of neither messages nor deltas. `routed`: a column names the topic."""
    given = {field.name: field.dataType.simpleString() for field in schema}
    allowed, needed = (MESSAGE, ()) if "value" in given else (DELTA, DELTA_NEEDED)
    if routed and "topic" not in given:
        raise InvalidArgument("topic is missing: give the option or a column", field="topic")
    allowed = {**allowed, "topic": ("string",)} if routed else allowed
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
def _headers(pairs: tuple[tuple[str, str | bytes], ...]) -> bytes:
    return msgspec.msgpack.encode(dict(pairs))


def _encoded(
    batch: pa.RecordBatch, config: TopicConfig, *, producer: str, first: int
) -> pa.BinaryArray:
    """The payloads of deltas, encoded by columns: rows of one shape together. Without an id a delta
    gets one that its place in the write implies."""
    if config.kind is not TopicKind.DELTA:
        raise InvalidArgument(
            f"{config.name} is no delta topic: write a column value", field="topic"
        )
    rows = DeltaFrame(batch)
    made = _made_ids(producer, range(first, first + batch.num_rows))
    ids, parents = rows.ids("delta_id", made), rows.ids("parent", np.zeros_like(made))
    order, groups = rows.groups()
    found = [rows.encoded(own, ids=ids[own], parents=parents[own]) for own in groups]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    payloads = pa.concat_arrays(found).take(pa.array(back))
    # Times are left to the clock of the node.
    validate(DeltaBatch.of(binary(payloads)), dimensions=config.dimensions, now_ms=TIME_MAX)
    return payloads


def _made_ids(producer: str, numbers: range) -> NDArray[np.uint8]:
    """An id for each row of a write, the same whenever it is done again: the producer's hash, and
    the number of the row, mixed so that no two numbers meet."""
    found = np.empty((len(numbers), 2), np.uint64)
    found[:, 0] = xxhash.xxh3_64_intdigest(producer.encode())
    mixed = np.arange(numbers.start, numbers.stop, dtype=np.uint64) + found[:, 0]
    for shift, factor in _MIXING:
        mixed = (mixed ^ (mixed >> shift)) * factor
    found[:, 1] = mixed ^ (mixed >> np.uint64(31))
    return found.view(np.uint8).reshape(-1, len(NO_ID))


class DeltaFrame:
    """The columns of deltas, with those that were not given. What is refused here could not be
    encoded; whether a payload is a delta is checked when there is one."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._count = batch.num_rows
        self._given = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in DELTA_NEEDED:
            if self._given[name].null_count:
                raise InvalidArgument(f"{name} is null in some row", field=name)
        self.namespaces = self._namespaces()
        self.vector_ids = self._column("vector_id", pa.string()).to_pylist()
        self.op = _codes(self._column("op", pa.string()), OPS, "op")
        source = pc.fill_null(self._column("source", pa.string()), "transform")
        self.source = _codes(source, SOURCES, "source")
        priority = self._column("priority", pa.uint8())
        self.priority = np.asarray(pc.fill_null(priority, int(PriorityClass.NORMAL)))
        self.times = np.asarray(self._column("delta_time", pa.int64()))
        self.origins = _padded(self._column("origin", pa.binary()), "origin")
        self.metadata = self._metadata()
        self.sizes, self.starts, self.values = _flat(self._column("values", pa.list_(pa.float32())))
        indices = self._column("indices", pa.list_(pa.int32()))
        self.indexed = np.asarray(indices.is_valid())
        named, self.index_starts, self.indices = _flat(indices)
        if (named != self.sizes)[self.indexed].any():
            raise InvalidArgument("a row has more or fewer indices than values", field="indices")
        self._order_clocks(self._column("clock", pa.map_(pa.string(), pa.int64())))

    def _column(self, name: str, kind: pa.DataType) -> pa.Array:
        found = self._given.get(name)
        return pa.nulls(self._count, kind) if found is None else found.cast(kind)

    def _namespaces(self) -> str | list[str]:
        """One for all, or one for each."""
        column = self._column("namespace", pa.string())
        names = column.unique()
        return names[0].as_py() if len(names) == 1 else column.to_pylist()  # type: ignore[no-any-return]

    def _metadata(self) -> list[bytes] | None:
        column = self._column("metadata", pa.string())
        if column.null_count == self._count:
            return None
        return [
            b"" if text is None else msgspec.msgpack.encode(_MAPS.decode(text))
            for text in column.to_pylist()
        ]

    def ids(self, name: str, missing: NDArray[np.uint8]) -> NDArray[np.uint8]:
        column = self._column(name, pa.binary())
        if column.null_count == self._count:
            return missing
        other = map(bytes, missing)
        found = [id_ or made for id_, made in zip(column.to_pylist(), other, strict=True)]
        if set(map(len, found)) != {len(NO_ID)}:
            raise InvalidArgument(f"{name} must be 16 bytes", field=name, limit=len(NO_ID))
        return np.frombuffer(b"".join(found), np.uint8).reshape(-1, len(NO_ID))

    def _order_clocks(self, column: pa.MapArray) -> None:
        """All entries of clocks, of each row its own origin first, and the others by name. Without
        a clock a delta is the first of its vector from its origin."""
        offsets = column.offsets.to_numpy()
        sizes, span = np.diff(offsets), slice(int(offsets[0]), int(offsets[-1]))
        absent = np.flatnonzero(sizes == 0)
        row = np.concatenate([np.repeat(np.arange(self._count), sizes), absent])
        seen = _padded(column.keys[span].cast(pa.binary()), "clock")
        origins = np.concatenate([seen, self.origins[absent]])
        counters = np.concatenate([np.asarray(column.items[span]), np.ones(len(absent), np.int64)])
        order = np.lexsort((origins, origins != self.origins[row], row))
        self.clock_sizes = np.maximum(sizes, 1)
        self.clock_starts = np.cumsum(self.clock_sizes) - self.clock_sizes
        self.clocks = np.zeros(len(row), CLOCK_DTYPE)
        self.clocks["origin"] = origins[order].view("<u8").reshape(-1, 2)
        self.clocks["counter"] = counters[order]
        if (origins[order][self.clock_starts] != self.origins).any():
            raise InvalidArgument("a clock does not count the delta's own origin", field="clock")

    def groups(self) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        """The rows by what has to be the same in one call of the encoder."""
        keys = self.source.astype(np.int64)
        for column in (self.sizes, self.indexed, self.clock_sizes):
            keys = keys * (int(column.max()) + 1) + column
        order = np.argsort(keys, kind="stable")
        return order, np.split(order, np.flatnonzero(np.diff(keys[order])) + 1)

    def encoded(self, own: NDArray[np.int64], *, ids: Ids, parents: Ids) -> pa.BinaryArray:
        row, rows = int(own[0]), own.tolist()
        components, others = np.arange(self.sizes[row]), np.arange(1, self.clock_sizes[row])
        columns = DeltaColumns(
            vector_ids=[self.vector_ids[r] for r in rows],
            values=self.values[self.starts[own][:, None] + components],
            indices=self.indices[self.index_starts[own][:, None] + components]
            if self.indexed[row]
            else None,
            namespace=self.namespaces
            if isinstance(self.namespaces, str)
            else [self.namespaces[r] for r in rows],
            op=self.op[own],
            priority=self.priority[own],
            source=Source(int(self.source[row])),
            metadata=None if self.metadata is None else [self.metadata[r] for r in rows],
        ).checked()
        causes = Causes(
            ids,
            parents,
            self.clocks["counter"][self.clock_starts[own]],
            self.times[own],
            self.clocks[self.clock_starts[own][:, None] + others],
        )
        names = Names.of(columns.namespace, columns.vector_ids)
        origin, every = self.origins[own].tobytes(), np.arange(len(own))
        found = encode_columns(columns, names, causes, origin=origin, rows=every)
        return arrays.ragged(found.offsets, found.blob, pa.binary())


def _flat(lists: pa.ListArray) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """How many values each row has, where they begin, and all of them."""
    sizes = np.asarray(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
    return sizes, np.cumsum(sizes) - sizes, lists.flatten().to_numpy(zero_copy_only=False)


def _padded(texts: pa.BinaryArray, field: str) -> NDArray[np.bytes_]:
    if (pc.max(pc.binary_length(texts)).as_py() or 0) > ORIGIN_BYTES_MAX:
        raise InvalidArgument(
            f"an origin has at most {ORIGIN_BYTES_MAX} bytes", field=field, limit=ORIGIN_BYTES_MAX
        )
    return np.array(texts.to_pylist(), f"S{ORIGIN_BYTES_MAX}")


def _codes(names: pa.StringArray, words: pa.StringArray, field: str) -> NDArray[np.uint8]:
    found = pc.index_in(pc.utf8_lower(names), value_set=words)
    if found.null_count:
        known = words.to_pylist()
        raise InvalidArgument(f"{field} is one of {', '.join(known)}", field=field, limit=known)
    return np.asarray(found).astype(np.uint8)


EPOCH: Final = 1
ROWS_BITS: Final = 32  # of a sequence; a micro-batch's number stands above
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


def write(
    options: WriteOptions,
    batches: Iterator[pa.RecordBatch],
    *,
    producer: str,
    task: int,
    base: int = 0,
) -> WriterCommitMessage:
    """What a task writes: each row to the topic of the options, or to that of its column."""
    writers: dict[str, TaskWriter] = {}
    for topic, own in by_topic(batches, options.topic):
        if topic not in writers:
            access = options.node.access()
            writers[topic] = TaskWriter(access, topic, producer=producer, task=task, base=base)
        writers[topic].write(own)
    return WriterCommitMessage()


def by_topic(
    batches: Iterator[pa.RecordBatch], topic: str | None
) -> Iterator[tuple[str, Iterable[pa.RecordBatch]]]:
    if topic is not None:
        yield topic, batches
        return
    for batch in batches:
        column = batch.column("topic")
        if column.null_count:
            raise InvalidArgument("topic is null in some row", field="topic")
        rows = batch.drop_columns("topic")
        for name in column.unique().to_pylist():
            yield name, [rows.filter(pc.equal(column, name))]


class TaskWriter:
    """What a task writes to one topic."""

    def __init__(
        self, access: NodeAccess, topic: str, *, producer: str, task: int, base: int
    ) -> None:
        self._access = access
        self._config: TopicConfig = access.config(topic)
        self._producer = f"{producer}/{task}"
        if len(self._producer.encode()) > PRODUCER_ID_BYTES_MAX:
            raise InvalidArgument(
                "producer is too long", field="producer", limit=PRODUCER_ID_BYTES_MAX - 8
            )
        self._task, self._base = task, base
        self._sent = Counter[int]()  # rows by partition

    def write(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._access.enqueue_all(self._config.name, self._requests(batches))

    def _requests(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[Part]]:
        for batch in filter(len, batches):
            first = self._base + self._sent.total()
            items = items_of(batch, self._config, producer=self._producer, first=first)
            targets = self._targets(items)
            items = replace(items, sequences=self._number(targets))
            yield from requests(items, targets, producer=self._producer, epoch=EPOCH)

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
        check_schema(schema, routed=options.topic is None)
        self._options, self._producer = options, producer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = _context().partitionId()
        return write(self._options, iterator, producer=self._producer, task=task)


class PenstockStreamWriter(DataSourceStreamArrowWriter):
    """A streaming write; the query's id, which its checkpoint keeps, is the producer."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_schema(schema, routed=options.topic is None)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _context()
        query, number = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
        if query is None or number is None:
            raise FailedPrecondition("Spark does not say which micro-batch this is")
        return write(
            self._options,
            iterator,
            producer=self._options.producer or query,
            task=context.partitionId(),
            base=int(number) << ROWS_BITS,
        )


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise FailedPrecondition("a writer runs in Spark's tasks")
    return context
