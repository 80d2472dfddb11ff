"""Penstock and Spark: the data source `penstock`, the propagation pipeline and its batch jobs."""
