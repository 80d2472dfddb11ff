"""The data source `penstock`: topics as tables and streams of Spark, to read and to write."""

from __future__ import annotations

import uuid

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from penstock.errors import InvalidArgument
from penstock.spark.source import rows
from penstock.spark.source.options import ReadOptions, WriteOptions
from penstock.spark.source.reader import PenstockReader, PenstockStreamReader
from penstock.spark.source.writer import PenstockStreamWriter, PenstockWriter


class PenstockSource(DataSource):
    """Spark makes one for every use; the work is done by what it returns."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        return rows.schema_of(ReadOptions.of(self.options).mode)

    def reader(self, schema: StructType) -> DataSourceReader:
        return PenstockReader(ReadOptions.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        return PenstockStreamReader(ReadOptions.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = self._writing(overwrite)
        # Made here, on the driver: all attempts of this write's tasks share it.
        return PenstockWriter(options, schema, producer=options.producer or str(uuid.uuid4()))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's
        return PenstockStreamWriter(self._writing(overwrite), schema)

    def _writing(self, overwrite: bool) -> WriteOptions:
        if overwrite:
            raise InvalidArgument("a topic is appended to, not overwritten", field="mode")
        return WriteOptions.of(self.options)
