"""Batch jobs over the log and the sinks, on the code that the pipeline runs on.

A job folds whole partitions by Spark's tasks (`log_fold`) or goes through files (`import_units`),
and answers with a document for the command line. Jobs that write into a pipeline's sinks hold the
lock of its state folder.
"""
