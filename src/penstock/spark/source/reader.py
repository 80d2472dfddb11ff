"""Topics as tables and streams of Spark, to read.

`spark.read` is a batch read of what is final now, `spark.readStream` gives ranges of the log,
trigger by trigger.

A range is final: committed, and every atomic batch in it is decided. So a range read again gives
the same rows. A reader plans on the driver, that of a stream in a Python process of its own for as
long as the query runs; `read` runs in the tasks.

The batch reader takes some of a query's conditions on itself. Conditions on topic, partition and
sequence choose ranges, exactly; on time they narrow ranges down by the log's own order, and Spark
looks at the rows that are left; on a delta's namespace they are applied while the rows are made.
Everything else stays with Spark.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.spark.source import rows
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import ReadOptions
from penstock.spark.source.ranges import (
    Json,
    LogBounds,
    Offsets,
    ReadRange,
    TriggerBudget,
    advance,
    between,
    from_json,
    planned,
    to_json,
)

if TYPE_CHECKING:
    import pyarrow as pa

_END: Final = 1 << 63
_NEVER_NULL: Final = frozenset({"topic", "partition", "sequence", "time", "namespace"})


class PushedFilter:
    """What the reader takes on itself, by column."""

    def __init__(self) -> None:
        self.among: dict[str, frozenset[Any]] = {}  # the only values allowed
        self.bounds: dict[str, tuple[int, int]] = {}  # inclusive

    def push(self, condition: Filter, name: str) -> bool:
        """Add a condition on a column; False if Spark must check it, be it besides."""
        if isinstance(condition, IsNotNull):
            return name in _NEVER_NULL
        values = _values(condition)
        if name in ("topic", "namespace", "partition") and values is not None:
            self.among[name] = self.among.get(name, values) & values
            return True
        if name not in ("partition", "sequence", "time"):
            return False
        bounds = _bounds(condition, time=name == "time")
        if bounds is None:
            return False
        low, high = self.bounds.get(name, bounds)
        self.bounds[name] = max(low, bounds[0]), min(high, bounds[1])
        return name != "time"

    def ranges(self, among: Iterable[ReadRange]) -> list[ReadRange]:
        low, high = self.bounds.get("sequence", (1, _END))
        cut = (
            replace(whole, first=max(whole.first, low), last=min(whole.last, high))
            for whole in among
            if self._allows("topic", whole.topic) and self._allows("partition", whole.partition)
        )
        return [found for found in cut if found.first <= found.last]

    def _allows(self, name: str, value: Any) -> bool:
        low, high = self.bounds.get(name, (value, value))
        return value in self.among.get(name, (value,)) and low <= value <= high


def push(filters: Sequence[Filter], columns: Iterable[str]) -> tuple[PushedFilter, list[Filter]]:
    """The selection, and the conditions that Spark must still check."""
    known, selection = set(columns), PushedFilter()
    named = [(condition, _column(condition)) for condition in filters]
    left = [c for c, name in named if not (name in known and selection.push(c, name))]
    return selection, left


def _column(condition: Filter) -> str:
    path: tuple[str, ...] = getattr(condition, "attribute", ())
    return path[0] if len(path) == 1 else ""


def _values(condition: Filter) -> frozenset[Any] | None:
    """The values that a condition allows, if it names them."""
    if isinstance(condition, In):
        found = frozenset(condition.value)
    elif isinstance(condition, EqualTo | EqualNullSafe):
        found = frozenset((condition.value,))
    else:
        return None
    return None if None in found else found


# What a comparison adds to its value for the least and for the greatest that it allows.
_LEAST: Final = {GreaterThan: 1, GreaterThanOrEqual: 0, EqualTo: 0, EqualNullSafe: 0}
_GREATEST: Final = {LessThan: -1, LessThanOrEqual: 0, EqualTo: 0, EqualNullSafe: 0}


def _bounds(condition: Filter, *, time: bool) -> tuple[int, int] | None:
    """The inclusive bounds of a comparison; of a time in ms, rounded outwards."""
    kind: Any = type(condition)
    value = getattr(condition, "value", None)
    value = _floor_ms(value) if time else value
    if not isinstance(value, int) or not (kind in _LEAST or kind in _GREATEST):
        return None
    step = 0 if time else 1
    low = value + step * _LEAST[kind] if kind in _LEAST else -_END
    high = value + step * _GREATEST[kind] if kind in _GREATEST else _END
    return low, high


def _floor_ms(value: Any) -> int | None:
    if not isinstance(value, datetime):
        return None
    known = value if value.tzinfo else value.replace(tzinfo=UTC)
    return int(known.timestamp() * 1000 // 1)


TIME_MS_MAX: Final = 1 << 52  # later than any clock: no bound


class PenstockReader(DataSourceReader):
    """A batch read, all of whose conditions Spark checks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        rows.check_schema(schema, options)
        self._options, self._schema = options, schema
        self._selection = PushedFilter()

    def partitions(self) -> Sequence[InputPartition]:
        access, options = self._options.node.access(), self._options
        bounds = LogBounds(access, options)
        ranges = self._selection.ranges(self._ranges(bounds))
        ranges = [found for found in (self._timed(access, r) for r in ranges) if found]
        return planned(access, ranges, options, ids=bounds.ids)

    def _ranges(self, bounds: LogBounds) -> Iterable[ReadRange]:
        return between(bounds.held(bounds.start()), bounds.end())

    def _selectable(self) -> Iterable[str]:
        """The columns whose conditions choose ranges or rows here."""
        return self._schema.fieldNames()

    def _timed(self, access: NodeAccess, whole: ReadRange) -> ReadRange | None:
        """The part of a range that the time bounds leave; batches are in order of time."""
        low, high = self._selection.bounds.get("time", (0, _END))
        first, last = whole.first, whole.last
        if low > 0:
            first = max(first, access.find_time(whole.topic, whole.partition, low))
        if high < TIME_MS_MAX:
            last = min(last, access.find_time(whole.topic, whole.partition, high + 1) - 1)
        return ReadRange(whole.topic, whole.partition, first, last) if first <= last else None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        namespaces = self._selection.among.get("namespace")
        return rows.read(self._options, self._schema, partition, namespaces=namespaces)


class SelectiveReader(PenstockReader):
    """A batch read that takes conditions on itself."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        self._selection, left = push(filters, self._selectable())
        return left


ROWS_MAX: Final = 1 << 62  # says that there is a bound, not which


class PenstockStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        rows.check_schema(schema, options)
        self._options, self._schema = options, schema
        self._target: Offsets | None = None  # of a query that ends by itself
        self._triggered = -math.inf

    def initialOffset(self) -> Json:  # noqa: N802 - Spark's name
        bounds = self._bounds()
        return to_json(bounds.held(bounds.start()), bounds.ids)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """What bounds there are, `latestOffset` knows. Spark only learns that there are some."""
        bounds = (self._options.rows_max, self._options.bytes_max)
        return ReadAllAvailable() if bounds == (None, None) else ReadMaxRows(ROWS_MAX)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = self._bounds().latest()

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802 - Spark's name
        bounds, options = self._bounds(), self._options
        begin = bounds.held(*from_json(start))
        end = bounds.latest()
        if self._target is not None:
            end = {t: _at_most(found, self._target.get(t, {})) for t, found in end.items()}
        if self._waits(sum(one.last - one.first + 1 for one in between(begin, end))):
            return start
        everything = isinstance(limit, ReadAllAvailable)
        most = (None, None) if everything else (options.rows_max, options.bytes_max)
        budget, measure = TriggerBudget(*most), options.node.access().extents
        found = advance(begin, end, topics=list(bounds.ids), budget=budget, measure=measure)
        return to_json(found, bounds.ids)

    def _waits(self, rows: int) -> bool:
        """Whether these are too few rows for a trigger, and the last one was not long ago."""
        now, options = time.monotonic(), self._options
        recent = now - self._triggered < options.delay_s
        waits = recent and rows < options.rows_min and self._target is None
        self._triggered = self._triggered if waits else now
        return waits

    def reportLatestOffset(self) -> Json:  # noqa: N802 - Spark's name
        bounds = self._bounds()
        return to_json(bounds.latest(), bounds.ids)

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        bounds = self._bounds()
        held, goal = bounds.held(*from_json(start)), bounds.still(*from_json(end))
        ranges = list(between(held, goal))
        access, options = self._options.node.access(), self._options
        return planned(access, ranges, options, ids=bounds.ids) if ranges else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows.read(self._options, self._schema, partition)

    def _bounds(self) -> LogBounds:
        return LogBounds(self._options.node.access(), self._options)


def _at_most(offsets: dict[int, int], bound: dict[int, int]) -> dict[int, int]:
    """A partition that came after the bound was set has nothing to read."""
    return {p: min(n, bound.get(p, 1)) for p, n in offsets.items()}
