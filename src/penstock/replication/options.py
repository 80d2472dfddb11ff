"""Times and bounds of replication; the node's configuration carries them as `[replication]`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicationOptions:
    heartbeat_ms: int = 300  # an idle stream shows a sign of life this often
    silence_ms: int = 1500  # without one, the other side counts as gone
    stagger_ms: int = 400  # the second candidate waits this much longer than the first, and so on
    fence_ms: int = 700  # between attempts to fence, adopt, or nominate again
    credit_entries: int = 1000  # of a follower's stream
    credit_bytes: int = 8 << 20
    ack_entries: int = 100  # received entries after which credit is returned, if that is less
    buffer_batches: int = 1000  # that arrived too early and wait
    buffer_ms: int = 5000
    lagging_ms: int = 60_000  # without credit for longer: the follower is lagging
    backpressure_ms: int = 1000  # a majority without credit for longer: writers are told
    caught_up_entries: int = 1000  # a learner this close to the end may become a voter
    seed_bytes_per_s: int = 64 << 20  # that a node copies when replicas start over or are new
