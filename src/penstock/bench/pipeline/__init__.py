"""Stages of the pipeline on Spark, and the log of changes that they work on."""
