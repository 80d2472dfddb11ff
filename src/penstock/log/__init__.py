"""The durable partition log."""

from penstock.log.crash import crash_point
from penstock.log.folder import DataFolder
from penstock.log.partition import Flush, LogOptions, PartitionLog, SegmentInfo, Snapshot

__all__ = [
    "DataFolder",
    "Flush",
    "LogOptions",
    "PartitionLog",
    "SegmentInfo",
    "Snapshot",
    "crash_point",
]
