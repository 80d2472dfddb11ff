"""The driver's named crash points (`penstock.log.crash`); the log has its own."""

from typing import Final

NODE_POINTS: Final = (
    "node.barrier.staged",
    "node.enqueue.staged",
    "node.ack.staged",
    "node.commit.unanswered",
    "node.lease.undelivered",
    "node.snapshot.committed",
    "node.atomic.staged",
    "node.atomic.prepared",
    "node.atomic.decided",
)
