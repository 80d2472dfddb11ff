"""Batch jobs over the log and the sinks, on the code that the pipeline runs on."""
