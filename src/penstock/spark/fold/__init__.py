"""The half of a pipeline that makes the triggers: jobs of Spark over ranges of the log."""
