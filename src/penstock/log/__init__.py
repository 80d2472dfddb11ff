"""The durable partition log."""

from penstock.log.crash import crash_point
from penstock.log.folder import DataFolder
from penstock.log.partition import Flush, LogOptions, PartitionLog, SegmentInfo, Snapshot
from penstock.log.replica import ReplicaFile
from penstock.log.verify import Report, verify_folder

__all__ = [
    "DataFolder",
    "Flush",
    "LogOptions",
    "PartitionLog",
    "ReplicaFile",
    "Report",
    "SegmentInfo",
    "Snapshot",
    "crash_point",
    "verify_folder",
]
