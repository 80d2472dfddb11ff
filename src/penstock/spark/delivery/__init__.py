"""The half of a pipeline that follows the triggers: each sink at its own pace, by tasks on
Spark or by a thread of the driver.
"""
