"""The half of a pipeline that follows the triggers: each sink at its own pace.

In come committed triggers of the change log; out go writes to sinks, letters, cursors on disk,
`status.json` and metrics. Spark is not touched here.
"""
