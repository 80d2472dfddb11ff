"""The data source `penstock`: topics as tables and streams of Spark, to read and to write."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from penstock.spark import modes
from penstock.spark.options import ReadOptions


class PenstockSource(DataSource):
    """Spark makes one for every use; the work is done by what it returns."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        return modes.schema_of(ReadOptions.of(self.options).mode)

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.reader import PenstockReader

        return PenstockReader(ReadOptions.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        from penstock.spark.stream import PenstockStreamReader

        return PenstockStreamReader(ReadOptions.of(self.options), schema)
