"""Topics as DataFrames.

`format` has what Spark loads; `folded` reads what the fold of a partition gives: released deltas,
and vectors. Everything else is `penstock.spark.source`'s.
"""
