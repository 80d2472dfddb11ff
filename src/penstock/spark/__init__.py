"""Penstock and Spark: the data source `penstock`, the propagation pipeline and its batch jobs.

`source` reads and writes topics for Spark. `fold` turns ranges of the log into triggers of a change
log, `delivery` takes the triggers to the sinks, and `pipeline` runs both. `jobs` work on whole logs
and whole sinks. A node is reached through the client alone.
"""
