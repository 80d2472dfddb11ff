"""Sending a log to those who follow it: a pump per stream, that reads the log where the reader is.

Nothing is queued for a reader. When it has credit and its connection takes more, the next slice is
read from the log; staged batches count, so that replicas sync while we do. A slow reader costs its
window of memory and nobody else's time. What a new replica has to copy goes out at a pace that all
streams of the node share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import Corruption, NotFound
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.node.replica.ports import CopyPace, Key, ReplicaTransport
from penstock.replication.effects import Effects
from penstock.replication.messages import Append, Followed
from penstock.replication.replica import Replica
from penstock.replication.sender import SendWindow

SLICE_BYTES: Final = 1 << 20  # of one frame
WATERMARK_S: Final = 0.01  # how often readers are told of commits that no slice has told of


@dataclass(slots=True, eq=False)
class _Stream:
    """The sending end of a stream."""

    number: int
    blocked: bool = False  # its connection takes no more for now
    reading: bool = False  # a thread reads for it
    resting: bool = False  # what was copied to it is not paid for yet
    told: int = 0  # the commit that its reader was sent last


class LogSender:
    def __init__(
        self,
        key: Key,
        replica: Replica,
        log: PartitionLog,
        *,
        transport: ReplicaTransport,
        pace: CopyPace,
        now: Callable[[], int],
        perform: Callable[[Effects], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_unreadable: Callable[[Corruption], None],
    ) -> None:
        self._on_unreadable = on_unreadable
        self._key, self._replica, self._log = key, replica, log
        self._transport, self._pace, self._now = transport, pace, now
        self._perform, self._spawn = perform, spawn
        self.streams: dict[str, _Stream] = {}
        self._pumped = 0  # what every stream was offered, or is waited for
        self._watermark: asyncio.TimerHandle | None = None

    def opened(self, node: str, stream: int) -> None:
        """The reader was told where its stream begins: it may have slices now."""
        self.streams[node] = _Stream(stream)
        self.pump(node)

    def closed(self, node: str, stream: int) -> None:
        held = self.streams.get(node)
        if held is not None and held.number == stream:
            del self.streams[node]

    def close(self) -> None:
        self.streams.clear()
        self._pumped = 0
        if self._watermark is not None:
            self._watermark.cancel()
            self._watermark = None

    def on_writable(self, node: str) -> None:
        held = self.streams.get(node)
        if held is not None and held.blocked:
            held.blocked = False
            self.pump(node)

    def pump_all(self) -> None:
        """Offer what is new to all. A stream that cannot take it goes on when it can."""
        if self._pumped == self._log.sequence_last:
            return
        self._pumped = self._log.sequence_last
        for node in tuple(self.streams):
            self.pump(node)

    def pump(self, node: str) -> None:
        """Send what is there, and fits both the reader's credit and its connection."""
        stream = self.streams.get(node)
        while stream is not None and not (stream.blocked or stream.reading):
            window = self._replica.may_send(node)
            if window is None or (window.copying and stream.resting):
                return
            try:
                batches = self._read(window, nowait=True)
            except Corruption as error:
                self._give_up(node, stream, error)
                return
            if batches is None:
                stream.reading = True
                self._spawn(self._read_cold(node, stream, window))
                return
            if not self._send(node, stream, window, batches):
                return

    def _read(self, window: SendWindow, *, nowait: bool) -> list[Batch] | None:
        try:
            return self._log.reader.read_slice(
                window.first, through=window.through, bytes_max=min(window.bytes, SLICE_BYTES),
                nowait=nowait, staged=True,
            )  # fmt: skip
        except NotFound:  # dropped by retention meanwhile
            return []

    async def _read_cold(self, node: str, stream: _Stream, window: SendWindow) -> None:
        """The page cache misses: read in a thread, then go on."""
        try:
            batches = await asyncio.to_thread(self._read, window, nowait=False)
        except Corruption as error:
            if self.streams.get(node) is stream:
                self._give_up(node, stream, error)
            return
        finally:
            stream.reading = False
        if self.streams.get(node) is not stream:
            return
        now = self._replica.may_send(node)
        if now is None or now.first != window.first:
            return
        if self._send(node, stream, now, batches or []):
            self.pump(node)

    def _send(self, node: str, stream: _Stream, window: SendWindow, batches: list[Batch]) -> bool:
        """Send the leading batches that the credit covers, one at least."""
        fitting: list[Batch] = []
        entries = size = 0
        for batch in batches:
            over = entries + batch.count > window.entries or size + batch.size > window.bytes
            if (fitting and over) or batch.compacted:
                break
            fitting.append(batch)
            entries, size = entries + batch.count, size + batch.size
        if not fitting or fitting[0].first != window.first:
            if window.first <= self._log.sequence_durable:
                self._drop(node, stream)  # what it needs is no longer here as it was written
            return False
        append = self._replica.append_to(node)
        if not self._transport.send_slice(node, self._key, append, fitting):
            stream.blocked = True
            return False
        stream.told = append.committed
        now = self._now()
        sent = self._replica.on_sent(node, fitting[-1].last, entries=entries, bytes=size, now=now)
        if sent:
            self._perform(sent)
        if window.copying:
            self._rest(node, stream, size)
        return True

    def _rest(self, node: str, stream: _Stream, size: int) -> None:
        """Go on with a copy when this much is paid for."""

        def rested() -> None:
            stream.resting = False
            if self.streams.get(node) is stream:
                self.pump(node)

        stream.resting = True
        asyncio.get_running_loop().call_later(self._pace.take(size), rested)

    def _give_up(self, node: str, stream: _Stream, error: Corruption) -> None:
        """What the reader needs is damaged here. It hears no more on this stream, and looks for
        another."""
        self._on_unreadable(error)
        self._drop(node, stream)

    def _drop(self, node: str, stream: _Stream) -> None:
        """Have a reader open its stream anew: it will be told to start over from a snapshot."""
        replica = self._replica
        del self.streams[node]
        replica.on_follower_lost(node, stream.number)
        refusal = Followed(
            replica.node, replica.epoch, stream.number, 0, replica.committed, refused=True
        )
        self._transport.send(node, self._key, refusal)

    # --- signs of life, and the watermark ---

    def send_sign(self, node: str, append: Append) -> None:
        """A slice without batches. It is not worth waiting for a connection that is full."""
        if self._transport.send_slice(node, self._key, append, []) and node in self.streams:
            self.streams[node].told = append.committed

    def on_commit(self) -> None:
        """Tell readers of the commit, soon; the next slice does it if there is one by then.

        All partitions do that at the same moments, so that a node hears of them in one go.
        """
        if self._watermark is None:
            loop = asyncio.get_running_loop()
            when = (loop.time() // WATERMARK_S + 2) * WATERMARK_S
            self._watermark = loop.call_at(when, self._send_watermarks)

    def _send_watermarks(self) -> None:
        self._watermark = None
        coordinator = self._replica.coordinator
        if coordinator is None:
            return
        committed = coordinator.sequence_committed
        for node, stream in self.streams.items():
            if stream.told >= committed or stream.blocked or node not in coordinator.senders:
                continue
            self.send_sign(node, self._replica.append_to(node))
