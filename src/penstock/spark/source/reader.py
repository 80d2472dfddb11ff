"""`spark.read.format("penstock")`: a batch read of what is final now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from penstock.spark.source import modes
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.bounds import Bounds
from penstock.spark.source.filters import Selection, push
from penstock.spark.source.options import ReadOptions
from penstock.spark.source.ranges import Range, between, measured, split

if TYPE_CHECKING:
    import pyarrow as pa

TIME_MS_MAX: Final = 1 << 52  # later than any clock: no bound


class PenstockReader(DataSourceReader):
    """Plans ranges on the driver; tasks read them from the node."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        modes.check_schema(schema, options.mode)
        self._options, self._schema = options, schema
        self._selection = Selection()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        self._selection, left = push(filters, self._schema.fieldNames())
        return left

    def partitions(self) -> Sequence[InputPartition]:
        access, options = self._options.node.access(), self._options
        bounds = Bounds(access, options)
        ranges = self._selection.ranges(between(bounds.held(bounds.start()), bounds.end()))
        ranges = [found for found in (self._timed(access, r) for r in ranges) if found]
        if options.mode == "ranges":
            return [measured(access, ranges)]
        return list(split(access, ranges, options.split_rows))

    def _timed(self, access: NodeAccess, whole: Range) -> Range | None:
        """The part of a range that the time bounds leave; batches are in order of time."""
        low, high = self._selection.time_ms
        first, last = whole.first, whole.last
        if low > 0:
            first = max(first, access.find_time(whole.topic, whole.partition, low))
        if high < TIME_MS_MAX:
            last = min(last, access.find_time(whole.topic, whole.partition, high + 1) - 1)
        return Range(whole.topic, whole.partition, first, last) if first <= last else None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return modes.read(
            self._options, self._schema, partition, namespaces=self._selection.namespaces
        )
