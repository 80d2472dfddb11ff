"""Spark looks for data sources in modules named `pyspark_*`, and takes their `DefaultSource`."""

from penstock.spark.frames.format import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
