"""`spark.read.format("penstock")`: a batch read of what is final now.

The reader takes some of a query's conditions on itself. Conditions on topic, partition and sequence
choose ranges, exactly; on time they narrow ranges down by the log's own order, and Spark looks at
the rows that are left; on a delta's namespace they are applied while the rows are made. Everything
else stays with Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSourceReader,
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
from pyspark.sql.types import StructType

from penstock.spark.source import modes
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import ReadOptions
from penstock.spark.source.ranges import LogBounds, ReadRange, between, measured, split

if TYPE_CHECKING:
    import pyarrow as pa

_END: Final = 1 << 63
_NEVER_NULL: Final = frozenset({"topic", "partition", "sequence", "time", "namespace"})


@dataclass(frozen=True)
class PushedFilter:
    """Bounds are inclusive. None: any."""

    topics: frozenset[str] | None = None
    namespaces: frozenset[str] | None = None
    partition: tuple[int, int] = (0, _END)
    partitions: frozenset[int] | None = None
    sequence: tuple[int, int] = (1, _END)
    time_ms: tuple[int, int] = (-_END, _END)

    def ranges(self, among: Iterable[ReadRange]) -> list[ReadRange]:
        """What the selection leaves of ranges."""
        found = []
        for whole in among:
            if self.topics is not None and whole.topic not in self.topics:
                continue
            if self.partitions is not None and whole.partition not in self.partitions:
                continue
            if not self.partition[0] <= whole.partition <= self.partition[1]:
                continue
            first = max(whole.first, self.sequence[0])
            last = min(whole.last, self.sequence[1])
            if first <= last:
                found.append(replace(whole, first=first, last=last))
        return found


def push(filters: Sequence[Filter], columns: Iterable[str]) -> tuple[PushedFilter, list[Filter]]:
    """The selection, and the conditions that Spark must still check."""
    known = set(columns)
    selection, left = PushedFilter(), []
    for condition in filters:
        name = _column(condition)
        pushed = _push(selection, condition, name) if name in known else None
        if pushed is None or name == "time":
            left.append(condition)
        selection = pushed or selection
    return selection, left


def _push(selection: PushedFilter, condition: Filter, name: str) -> PushedFilter | None:
    """The selection with a condition added; None if it is none of ours."""
    if isinstance(condition, IsNotNull):
        return selection if name in _NEVER_NULL else None
    values = _values(condition)
    if name in ("topic", "namespace", "partition") and values is not None:
        return _among(selection, name, frozenset(values))
    if name in ("partition", "sequence", "time"):
        bounds = _bounds(condition, time=name == "time")
        if bounds is None:
            return None
        field = "time_ms" if name == "time" else name
        low, high = getattr(selection, field)
        narrowed: dict[str, Any] = {field: (max(low, bounds[0]), min(high, bounds[1]))}
        return replace(selection, **narrowed)
    return None


def _among(selection: PushedFilter, name: str, values: frozenset[Any]) -> PushedFilter:
    field = name + "s"
    old = getattr(selection, field)
    narrowed: dict[str, Any] = {field: values if old is None else old & values}
    return replace(selection, **narrowed)


def _column(condition: Filter) -> str:
    path: tuple[str, ...] = getattr(condition, "attribute", ())
    return path[0] if len(path) == 1 else ""


def _values(condition: Filter) -> tuple[Any, ...] | None:
    """The values that a condition allows, if it names them."""
    if isinstance(condition, In):
        found = tuple(condition.value)
    elif isinstance(condition, EqualTo | EqualNullSafe):
        found = (condition.value,)
    else:
        return None
    return None if None in found else found


def _bounds(condition: Filter, *, time: bool) -> tuple[int, int] | None:
    """The inclusive bounds of a comparison; of a time in ms, rounded outwards."""
    value = getattr(condition, "value", None)
    low, high = (_floor_ms(value), _floor_ms(value)) if time else (value, value)
    if not isinstance(low, int) or not isinstance(high, int):
        return None
    if isinstance(condition, EqualTo | EqualNullSafe):
        return low, high
    step = 0 if time else 1
    if isinstance(condition, GreaterThan):
        return low + step, _END
    if isinstance(condition, GreaterThanOrEqual):
        return low, _END
    if isinstance(condition, LessThan):
        return -_END, high - step
    if isinstance(condition, LessThanOrEqual):
        return -_END, high
    return None


def _floor_ms(value: Any) -> int | None:
    if not isinstance(value, datetime):
        return None
    known = value if value.tzinfo else value.replace(tzinfo=UTC)
    return int(known.timestamp() * 1000 // 1)


TIME_MS_MAX: Final = 1 << 52  # later than any clock: no bound


class PenstockReader(DataSourceReader):
    """Plans ranges on the driver; tasks read them from the node."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        modes.check_schema(schema, options.mode)
        self._options, self._schema = options, schema
        self._selection = PushedFilter()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        self._selection, left = push(filters, self._schema.fieldNames())
        return left

    def partitions(self) -> Sequence[InputPartition]:
        access, options = self._options.node.access(), self._options
        bounds = LogBounds(access, options)
        ranges = self._selection.ranges(between(bounds.held(bounds.start()), bounds.end()))
        ranges = [found for found in (self._timed(access, r) for r in ranges) if found]
        if options.mode == "ranges":
            return [measured(access, ranges)]
        return list(split(access, ranges, options.split_rows))

    def _timed(self, access: NodeAccess, whole: ReadRange) -> ReadRange | None:
        """The part of a range that the time bounds leave; batches are in order of time."""
        low, high = self._selection.time_ms
        first, last = whole.first, whole.last
        if low > 0:
            first = max(first, access.find_time(whole.topic, whole.partition, low))
        if high < TIME_MS_MAX:
            last = min(last, access.find_time(whole.topic, whole.partition, high + 1) - 1)
        return ReadRange(whole.topic, whole.partition, first, last) if first <= last else None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return modes.read(
            self._options, self._schema, partition, namespaces=self._selection.namespaces
        )
