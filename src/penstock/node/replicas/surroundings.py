"""What the hosts of a node share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PenstockError
from penstock.node.clock import Clock
from penstock.node.metrics import Metrics
from penstock.node.reading import ReadCache
from penstock.node.replicas.pacing import Pace
from penstock.node.replicas.ports import Control, Key, Transport
from penstock.node.syncer import Syncer
from penstock.node.writer import WriterPool
from penstock.replication.nomination import Policy
from penstock.replication.options import ReplicationOptions


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Surroundings:
    node: str
    clock: Clock
    metrics: Metrics
    writers: WriterPool
    syncer: Syncer | None
    cache: ReadCache
    control: Control
    transport: Transport | None  # None: this node is alone, and needs nobody's agreement
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    on_damage: Callable[[PenstockError], None]
    on_mended: Callable[[Key], None]
    on_fatal: Callable[[BaseException], None]
    reserve_bytes: int  # of each log: for settling when the disk is full
    options: ReplicationOptions = field(default_factory=ReplicationOptions)
    # Of streams to new replicas, over all hosts.
    pace: Pace = field(default_factory=lambda: Pace(ReplicationOptions().seed_bytes_per_s))
    policy: Policy = Policy.BALANCED
    cut_off: Callable[[], bool] = lambda: False  # another node may serve what this one cannot
    now: Callable[[], int] = monotonic_ms  # of replication; it never steps, forwards neither
