"""What a node does without being asked: snapshots, retention, verification, and its gauges.

It walks over topics and partitions in the background and reads their state for the metrics.
"""
