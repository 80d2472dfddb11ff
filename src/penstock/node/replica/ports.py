"""What a host of a partition stands among: the network, the metadata store, and its node.

A host decides nothing about connections: it names a node and a partition. Everything here is
called on the event loop. What returns None may fail without a word; whoever needs an answer asks
again, on its next tick.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.errors import PenstockError, Unavailable
from penstock.model.batch import Batch
from penstock.node.clock import Clock
from penstock.node.observe.metrics import Metrics
from penstock.node.replica.clocks import Clocks, undisputed
from penstock.node.serve.message_reader import ReadCache
from penstock.node.storage.log_io import Syncer, WriterPool
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import Append, Effects, Follow, Letter
from penstock.replication.facts import ReplicationOptions
from penstock.replication.takeover import Policy

Key = tuple[int, int]  # (topic id, partition)
Slow = Coroutine[Any, Any, Effects]  # the rest of an effect that takes a while, and what follows


class SeedHead(NamedTuple):
    """Where a copy begins and ends, and the state that it is to be replayed onto.

    The log begins at `first`, after a batch of `epoch` with hash `chain`. `snapshot` is the heap
    after `snapshot_sequence`; 0 and nothing: there is none, the log is whole.
    """

    first: int
    chain: int
    epoch: int
    through: int  # committed at the source, and a batch's last: the copy ends here
    snapshot_sequence: int = 0
    snapshot_chain: int = 0
    snapshot_epoch: int = 0
    snapshot: bytes = b""


class SeedTarget(Protocol):
    """A replica that starts over; after a copy that was cut short, again with `begin`."""

    async def begin(self, head: SeedHead) -> None:
        """Drop everything, keep the snapshot, and expect batches from `head.first` on."""

    async def write(self, batches: list[Batch]) -> None:
        """The next batches, in order. Returns once they are durable: then send more."""


FetchSeed = Callable[[str, Key, SeedTarget], Coroutine[Any, Any, None]]


class ReplicaTransport(Protocol):
    def send(self, to: str, key: Key, message: Letter) -> None:
        """Give a message to a node. An `Ack` goes on the stream that we have opened there, a
        `Followed` answers the `Follow` with the same stream number."""

    def open_stream(self, to: str, key: Key, follow: Follow) -> None:
        """Have `to` stream its log to us; replaces the stream that the key had. What comes of it
        arrives at `on_message` (`Followed`), `on_slice` and `on_stream_lost`."""

    def close_stream(self, key: Key) -> None:
        """Stop reading the stream that we have opened. The other end sees it close."""

    def send_slice(self, to: str, key: Key, append: Append, batches: list[Batch]) -> bool:
        """Send on the stream that `to` has opened here. False: nothing was sent, its buffer is
        full or it is gone; `on_writable` or `on_follower_lost` comes later."""

    async def fetch_seed(self, source: str, key: Key, into: SeedTarget, /) -> None:
        """One `begin`, then `write` until `through`. Raises a `PenstockError` if that cannot be."""


class NoPeers:
    """The transport of a node that is alone: its replicas have nobody to talk to."""

    def send(self, to: str, key: Key, message: Letter) -> None:
        return

    def open_stream(self, to: str, key: Key, follow: Follow) -> None:
        return

    def close_stream(self, key: Key) -> None:
        return

    def send_slice(self, to: str, key: Key, append: Append, batches: list[Batch]) -> bool:
        return False

    async def fetch_seed(self, source: str, key: Key, into: SeedTarget) -> None:
        raise Unavailable("this node is alone: there is nobody to copy from")


class Control(Protocol):
    def take_epoch(self, key: Key) -> None:
        """Try to. `on_epoch_taken` tells of a win; that another was faster, a new record."""

    def change_record(self, key: Key, record: PartitionRecord, revision: int) -> None:
        """Swap the record if it still has that revision; `on_record` or `on_change_lost` tells."""

    def renew(self, key: Key, *, uuid: str, epoch: int) -> None:
        """Our copy, this disk's, is damaged, and whoever holds `epoch` has all that is committed:
        the host may be closed and another opened, which copies the log anew. Nothing happens if
        the record says something else by now, or while another replica is being replaced."""

    def retire(self, key: Key) -> None:
        """The record names us no longer: the host may be closed and its folder removed."""


class CopyPace:
    """Bytes per second for all copies together: moving replicas leaves room for the traffic."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0  # when what was taken so far is paid for

    def take(self, count: int) -> float:
        """In how many seconds these bytes, and all that were taken before, are paid for."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + count / self._bytes_per_s
        return self._free_at - now

    async def spend(self, count: int) -> None:
        await asyncio.sleep(self.take(count))


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
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    on_damage: Callable[[PenstockError], None]
    on_mended: Callable[[Key], None]
    on_fatal: Callable[[BaseException], None]
    reserve_bytes: int  # of each log: for settling when the disk is full
    transport: ReplicaTransport = field(default_factory=NoPeers)
    alone: bool = True  # this node needs nobody's agreement
    options: ReplicationOptions = field(default_factory=ReplicationOptions)
    # Of streams to new replicas, over all hosts.
    pace: CopyPace = field(default_factory=lambda: CopyPace(ReplicationOptions().seed_bytes_per_s))
    policy: Policy = Policy.BALANCED
    clocks: Clocks = field(default_factory=undisputed)
    barred: Callable[[], bool] = lambda: False  # this node must not begin to coordinate
    cut_off: Callable[[], bool] = lambda: False  # another node may serve what this one cannot
    now: Callable[[], int] = monotonic_ms  # of replication; it never steps, forwards neither
