"""The data source `penstock`: topics as tables and streams of Spark, to read and to write.

Where the node is, the driver decides, once for all tasks: an option says it, else `PENSTOCK_URL` of
the driver's environment. Options are looked at when a read or a write is planned, and tasks get
what was made of them. Spark plans in a Python process on the driver's machine. If it has found the
source by itself, that process has the driver's environment. If the source was registered by a
program, it has that of the executors (`spark.executorEnv`) on top, so the program registers a class
that has its address in it (`source_at`).
"""

from __future__ import annotations

import sys
import uuid
from typing import ClassVar, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from penstock.errors import InvalidArgument
from penstock.spark.frames.folded import (
    FoldedReader,
    FoldedStreamReader,
    SelectiveFoldedReader,
)
from penstock.spark.source import rows
from penstock.spark.source.options import FOLDED, ReadOptions, WriteOptions
from penstock.spark.source.reader import PenstockReader, PenstockStreamReader, SelectiveReader
from penstock.spark.source.writer import PenstockStreamWriter, PenstockWriter

_PUSHDOWN: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class PenstockSource(DataSource):
    """Spark makes one for every use; the work is done by what it returns."""

    url: ClassVar[str | None] = None  # where the node is, unless an option says so

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        return rows.schema_of(ReadOptions.of(self._told()))

    def reader(self, schema: StructType) -> DataSourceReader:
        # Spark refuses a reader that takes filters in a session that does not pass them on. Where
        # one does, Spark runs this in the worker that hands them over.
        options, selective = ReadOptions.of(self._told()), _PUSHDOWN in sys.modules
        if options.mode in FOLDED:
            return (SelectiveFoldedReader if selective else FoldedReader)(options, schema)
        return (SelectiveReader if selective else PenstockReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        options = ReadOptions.of(self._told())
        kind = FoldedStreamReader if options.mode in FOLDED else PenstockStreamReader
        return kind(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = self._writing(overwrite)
        # Made here, on the driver: all attempts of this write's tasks share it.
        return PenstockWriter(options, schema, producer=options.producer or str(uuid.uuid4()))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's
        return PenstockStreamWriter(self._writing(overwrite), schema)

    def _writing(self, overwrite: bool) -> WriteOptions:
        if overwrite:
            raise InvalidArgument("a topic is appended to, not overwritten", field="mode")
        return WriteOptions.of(self._told())

    def _told(self) -> dict[str, str]:
        given = {name.lower(): value for name, value in self.options.items()}
        return given if self.url is None else {"url": self.url} | given


def source_at(url: str | None) -> type[PenstockSource]:
    """The source for a program to register. A class that is in no module travels as it is."""
    return type("PenstockSource", (PenstockSource,), {"url": url or None})
