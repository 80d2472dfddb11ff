"""The half of a pipeline that runs on Spark: ranges of the log become committed triggers."""
