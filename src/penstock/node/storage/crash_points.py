"""The driver's named crash points (`penstock.log.crash`); the log has its own."""

from typing import Final

NODE_POINTS: Final = (
    "node.barrier.staged",
    "node.enqueue.staged",
    "node.ack.staged",
    "node.commit.unanswered",
    "node.lease.undelivered",
    "node.snapshot.committed",
    # An atomic batch: whoever drives it,
    "node.atomic.staged",
    "node.atomic.prepared",
    "node.atomic.decided",
    # a participant that has staged its share, the home its decision, a participant its copy.
    "node.atomic.preparing",
    "node.atomic.deciding",
    "node.atomic.applying",
)

# Points that only a node of a cluster passes, when it raises the generation of its data folder.
DISK_POINTS: Final = (
    "log.generation.written",
    "node.disk.intended",
    "node.disk.told",
)
