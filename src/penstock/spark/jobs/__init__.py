"""Batch jobs over whole logs, sinks and files, on the code that the pipeline runs on.

Jobs that write into a pipeline's sinks hold the claim to drive it meanwhile.
"""
