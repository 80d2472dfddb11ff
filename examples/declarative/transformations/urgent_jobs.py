"""A declarative pipeline: a topic in, a table of it, and its urgent jobs into another topic."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()

dp.create_sink("urgent", "penstock", {"topic": "urgent"})


@dp.table
def jobs() -> DataFrame:
    """Every job that was ever put."""
    return spark.readStream.format("penstock").option("topic", "jobs").load()


@dp.append_flow(target="urgent")
def urgent_jobs() -> DataFrame:
    """Jobs of priority 0 to 2. They keep their priority."""
    return spark.readStream.table("jobs").where("priority < 3").select("value", "priority")
