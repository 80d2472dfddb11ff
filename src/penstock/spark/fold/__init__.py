"""The half of a pipeline that makes the triggers: Spark's query over ranges of the log.

In come ranges; a task per partition folds them with the kernels of `penstock.propagation` and
writes a change file, and the driver commits the trigger's manifest. Folding a range again gives the
same outcome, so whatever dies is run again.
"""
