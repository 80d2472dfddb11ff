"""What the hosts of a node share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PenstockError
from penstock.node.clock import Clock
from penstock.node.observe.metrics import Metrics
from penstock.node.replica.clocks import Clocks
from penstock.node.replica.pace import CopyPace
from penstock.node.replica.ports import Control, Key, ReplicaTransport
from penstock.node.serve.message_reader import ReadCache
from penstock.node.storage.syncer import Syncer, WriterPool
from penstock.replication.options import ReplicationOptions
from penstock.replication.takeover import Policy


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
    transport: ReplicaTransport | None  # None: this node is alone, and needs nobody's agreement
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    on_damage: Callable[[PenstockError], None]
    on_mended: Callable[[Key], None]
    on_fatal: Callable[[BaseException], None]
    reserve_bytes: int  # of each log: for settling when the disk is full
    options: ReplicationOptions = field(default_factory=ReplicationOptions)
    # Of streams to new replicas, over all hosts.
    pace: CopyPace = field(default_factory=lambda: CopyPace(ReplicationOptions().seed_bytes_per_s))
    policy: Policy = Policy.BALANCED
    clocks: Clocks | None = None  # None: there is nobody to compare the clock with
    barred: Callable[[], bool] = lambda: False  # this node must not begin to coordinate
    cut_off: Callable[[], bool] = lambda: False  # another node may serve what this one cannot
    now: Callable[[], int] = monotonic_ms  # of replication; it never steps, forwards neither
