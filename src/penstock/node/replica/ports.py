"""What a host of a partition asks of the network and of the metadata store, and they of it.

A host decides nothing about connections: it names a node and a partition. Everything here is
called on the event loop. What returns None may fail without a word; whoever needs an answer asks
again, on its next tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from penstock.model.batch import Batch
from penstock.replication.assignment import PartitionRecord
from penstock.replication.messages import (
    Ack,
    Append,
    Fence,
    Fenced,
    Follow,
    Followed,
    Probe,
    Probed,
)

Key = tuple[int, int]  # (topic id, partition)
Letter = Ack | Fence | Fenced | Followed | Probe | Probed  # goes by itself, not within a stream


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


class SeedSource(Protocol):
    """A replica that another may be copied from."""

    async def seed_head(self) -> SeedHead: ...

    async def seed_slice(self, from_sequence: int, *, through: int, bytes_max: int) -> list[Batch]:
        """Batches as stored, compacted ones too; at least one, whatever its size. Raises
        `NotFound` when they were dropped meanwhile: the copy begins anew."""
        ...


class SeedTarget(Protocol):
    """A replica that starts over. A copy that is cut short is given up; the next one begins
    again with `begin`."""

    async def begin(self, head: SeedHead) -> None:
        """Drop everything, keep the snapshot, and expect batches from `head.first` on."""
        ...

    async def write(self, batches: list[Batch]) -> None:
        """The next batches, in order. Returns once they are durable: then send more."""
        ...


class ReplicaTransport(Protocol):
    def send(self, to: str, key: Key, message: Letter) -> None:
        """Give a message to a node. An `Ack` goes on the stream that we have opened there, a
        `Followed` answers the `Follow` with the same stream number."""
        ...

    def open_stream(self, to: str, key: Key, follow: Follow) -> None:
        """Have `to` stream its log to us; replaces the stream that the key had. What comes of it
        arrives at `on_message` (`Followed`), `on_slice` and `on_stream_lost`."""
        ...

    def close_stream(self, key: Key) -> None:
        """Stop reading the stream that we have opened. The other end sees it close."""
        ...

    def send_slice(self, to: str, key: Key, append: Append, batches: list[Batch]) -> bool:
        """Send on the stream that `to` has opened here. False: nothing was sent, its buffer is
        full or it is gone; `on_writable` or `on_follower_lost` comes later."""
        ...

    async def fetch_seed(self, source: str, key: Key, into: SeedTarget) -> None:
        """Copy a replica: one `begin`, then `write` until `through` is reached. Raises a
        `PenstockError` if that is not possible now."""
        ...


class Control(Protocol):
    def take_epoch(self, key: Key) -> None:
        """Try to take the next epoch. Only a win is told, with `on_epoch_taken`; whoever else was
        faster is seen as a new record."""
        ...

    def change_record(self, key: Key, record: PartitionRecord, revision: int) -> None:
        """Swap the record if it still has that revision; `on_record` or `on_change_lost` tells."""
        ...

    def renew(self, key: Key, *, uuid: str, epoch: int) -> None:
        """Our copy, this disk's, is damaged, and whoever holds `epoch` has all that is committed:
        the host may be closed and another opened, which copies the log anew. Nothing happens if
        the record says something else by now, or while another replica is being replaced."""
        ...

    def retire(self, key: Key) -> None:
        """The record names us no longer: the host may be closed and its folder removed."""
        ...


class HostPort(SeedSource, Protocol):
    """A host as the network and the metadata store see it."""

    key: Key

    # --- from the metadata store ---

    def on_record(self, record: PartitionRecord, revision: int) -> None: ...

    def on_epoch_taken(self, record: PartitionRecord, revision: int) -> None: ...

    def on_change_lost(self) -> None: ...

    def on_members(self, alive: Mapping[str, int]) -> None:
        """Live nodes, each with the revision that it was created at."""
        ...

    # --- from other nodes ---

    def on_message(self, message: Letter) -> None: ...

    def on_follow(self, follow: Follow) -> None:
        """A node opens a stream here; the answer is a `Followed` to be sent."""
        ...

    def on_slice(self, append: Append, batches: list[Batch]) -> None:
        """Of the stream that we have opened. Bodies may be views of a network buffer."""
        ...

    def on_stream_lost(self, stream: int, *, gone: bool = False) -> None:
        """The stream that we have opened broke. `gone`: nobody listens there any more."""
        ...

    def on_follower_lost(self, node: str, stream: int) -> None: ...

    def on_writable(self, node: str) -> None:
        """There is room again after a `send_slice` that was refused."""
        ...

    # --- from the node ---

    @property
    def coordinates(self) -> bool:
        """Whether this node holds the partition's epoch and has entered it, or is about to."""
        ...

    def on_tick(self) -> None: ...

    async def resign(self) -> None:
        """Give up the epoch, after what is under way: another takes over at once."""
        ...
