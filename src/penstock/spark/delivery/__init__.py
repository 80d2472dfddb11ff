"""The half of a pipeline that follows the triggers: each sink at its own pace, without Spark."""
