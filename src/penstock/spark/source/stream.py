"""`spark.readStream.format("penstock")`: ranges of the log, trigger by trigger.

The object lives in a Python process of its own beside the driver for as long as the query runs;
its `read` runs in the tasks. What is read is final: committed, and every atomic batch in it is
decided. So a range read again gives the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import InvalidArgument
from penstock.spark.source import modes
from penstock.spark.source.offsets import Offsets, TriggerBudget, advance, from_json, to_json
from penstock.spark.source.options import ReadOptions
from penstock.spark.source.ranges import LogBounds, between, measured, split

if TYPE_CHECKING:
    import pyarrow as pa

Json = dict[str, dict[str, int]]
ROWS_MAX: Final = 1 << 62  # says that there is a bound, not which


class PenstockStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        modes.check_schema(schema, options.mode)
        self._options, self._schema = options, schema
        self._target: Offsets | None = None  # of a query that ends by itself

    def initialOffset(self) -> Json:  # noqa: N802 - Spark's name
        bounds = self._bounds()
        return self._json(bounds.held(bounds.start()))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Asked for once. The rows of a `rateFile` change: `latestOffset` looks them up."""
        options = self._options
        if options.rate_file is not None:
            return ReadMaxRows(ROWS_MAX)
        if options.rows_max is not None:
            return ReadMaxRows(options.rows_max)
        if options.bytes_max is not None:
            return ReadMaxBytes(options.bytes_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = self._bounds().latest()

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802 - Spark's name
        bounds = self._bounds()
        begin = bounds.held(from_json(start))
        end = bounds.latest()
        if self._target is not None:
            end = {t: _at_most(found, self._target.get(t, {})) for t, found in end.items()}
        found = advance(
            begin,
            end,
            topics=self._options.topics,
            budget=self._budget(limit),
            measure=self._options.node.access().extents,
        )
        return self._json(found)

    def reportLatestOffset(self) -> Json:  # noqa: N802 - Spark's name
        return self._json(self._bounds().latest())

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        options, access = self._options, self._options.node.access()
        held = self._bounds().held(from_json(start))
        ranges = list(between(held, from_json(end)))
        if not ranges:
            return []
        if options.mode == "ranges":
            return [measured(access, ranges)]
        return list(split(access, ranges, options.split_rows))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return modes.read(self._options, self._schema, partition)

    def _bounds(self) -> LogBounds:
        return LogBounds(self._options.node.access(), self._options)

    def _json(self, offsets: Offsets) -> Json:
        return to_json(offsets, self._options.topics)

    def _budget(self, limit: ReadLimit) -> TriggerBudget:
        if isinstance(limit, ReadAllAvailable):
            return TriggerBudget(None, None)
        options = self._options
        given = [limit.max_rows] if isinstance(limit, ReadMaxRows) else []
        if options.rate_file is not None:
            given = [rows for rows in (options.rows_max, self._rate()) if rows is not None]
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else options.bytes_max
        return TriggerBudget(min(given, default=None), size)

    def _rate(self) -> int | None:
        """Rows per trigger as the rate's file has them now, 0 for a pause; None: no file yet."""
        if self._options.rate_file is None:
            return None
        try:
            found: Any = json.loads(Path(self._options.rate_file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"rateFile cannot be read: {error}", field="rateFile") from error
        rows = found.get("rows") if isinstance(found, dict) else found
        if isinstance(rows, bool) or not isinstance(rows, int | float) or rows < 0:
            raise InvalidArgument('rateFile holds {"rows": 5000} or 5000', field="rateFile")
        return int(rows)


def _at_most(offsets: dict[int, int], bound: dict[int, int]) -> dict[int, int]:
    """A partition that came after the bound was set has nothing to read."""
    return {p: min(n, bound.get(p, 1)) for p, n in offsets.items()}
