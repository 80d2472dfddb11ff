"""The two ends of a replica's log: sent to those who follow it, or taken from who coordinates.

The sender has a pump per stream, that reads the log where the reader is. Nothing is queued for a
reader. When it has credit and its connection takes more, the next slice is read from the log;
staged batches count, so that replicas sync while we do. A slow reader costs its window of memory
and nobody else's time. What a new replica has to copy goes out at a pace that all streams of the
node share. The log of a replica that follows is extended, cut, or replaced as its stream says.

A replica with a damaged log hands over, then starts over as a copy of the others. Nothing is
dropped before another replica coordinates with a barrier of its own that is committed: that one has
all that was ever committed. Nor is it while there would be no majority without it. Until then the
damaged replica follows and votes, because where its log ends and what it has promised is true;
whoever has the only other copy may need that vote. It coordinates only if nobody else does, so that
one bad block does not stop a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Final

from penstock.errors import Corruption, DiskFull, NotFound, PenstockError
from penstock.log.crash import crash_point
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.node.observe.logs import get_logger
from penstock.node.replica.ports import Key, SeedHead, Slow, Surroundings
from penstock.node.replica.replay import HeapApplier, empty, facts_of
from penstock.node.storage.log_io import Flusher, SliceReader, covered
from penstock.replication.effects import Append, Effects, Followed
from penstock.replication.facts import LogFacts
from penstock.replication.replica import LogHealth, Replica
from penstock.replication.sender import SendWindow

SLICE_BYTES: Final = 1 << 20  # of one frame
WATERMARK_S: Final = 0.01  # how often readers are told of commits that no slice has told of
RETRY_S: Final = 1.0  # after a copy that failed
ASK_AGAIN_MS: Final = 1_000  # while it may not be replaced yet: another one is, or etcd is away
RESIGN_AGAIN_MS: Final = 10_000  # doubled each time: perhaps all of them are damaged
RESIGN_AGAIN_MS_MAX: Final = 600_000
log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Stream:
    number: int
    reader: SliceReader
    blocked: bool = False  # its connection takes no more for now
    resting: bool = False  # what was copied to it is not paid for yet
    told: int = 0  # the commit that its reader was sent last


@dataclass(slots=True, eq=False)
class LogSender:
    key: Key
    replica: Replica
    log: PartitionLog
    around: Surroundings
    _: KW_ONLY
    perform: Callable[[Effects], None]
    on_unreadable: Callable[[BaseException], None]
    streams: dict[str, _Stream] = field(default_factory=dict)  # by the node that reads
    _pumped: int = 0  # what every stream was offered, or is waited for
    _watermark: asyncio.TimerHandle | None = None

    def opened(self, node: str, stream: int) -> None:
        """The reader was told where its stream begins: it may have slices now."""
        reader = SliceReader(self.log, partial(self._on_failed, node, stream))
        self.streams[node] = _Stream(stream, reader)
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
        if self._pumped == self.log.sequence_last:
            return
        self._pumped = self.log.sequence_last
        for node in tuple(self.streams):
            self.pump(node)

    def pump(self, node: str) -> None:
        """Send what is there, and fits both the reader's credit and its connection."""
        stream = self.streams.get(node)
        while stream is not None and not (stream.blocked or stream.reader.busy):
            window = self.replica.may_send(node)
            if window is None or (window.copying and stream.resting):
                return
            batches = stream.reader.read(
                window.first, through=window.through, bytes_max=min(window.bytes, SLICE_BYTES),
                then=partial(self._on_read, node, stream, window.first),
            )  # fmt: skip
            if batches is None or not self._send(node, stream, window, batches):
                return

    def _on_read(self, node: str, stream: _Stream, first: int, batches: list[Batch]) -> None:
        """A thread has read them; if they are still what comes next, go on."""
        if self.streams.get(node) is not stream:
            return
        window = self.replica.may_send(node)
        if window is None or window.first != first:
            return
        if self._send(node, stream, window, batches):
            self.pump(node)

    def _send(self, node: str, stream: _Stream, window: SendWindow, batches: list[Batch]) -> bool:
        """Send the leading batches that the credit covers, one at least."""
        written = takewhile(lambda batch: not batch.compacted, batches)
        fitting, entries, size = covered(
            written, entries=window.entries, bytes=window.bytes, lone=True
        )
        if not fitting or fitting[0].first != window.first:
            if window.first <= self.log.sequence_durable:
                self._drop(node, stream)  # what it needs is no longer here as it was written
            return False
        append = self.replica.append_to(node)
        if not self.around.transport.send_slice(node, self.key, append, fitting):
            stream.blocked = True
            return False
        stream.told = append.committed
        now = self.around.now()
        sent = self.replica.on_sent(node, fitting[-1].last, entries=entries, bytes=size, now=now)
        if sent:
            self.perform(sent)
        if window.copying:
            self._rest(node, stream, size)
        return True

    def _rest(self, node: str, stream: _Stream, size: int) -> None:
        def rested() -> None:
            stream.resting = False
            if self.streams.get(node) is stream:
                self.pump(node)

        stream.resting = True
        asyncio.get_running_loop().call_later(self.around.pace.take(size), rested)

    def _on_failed(self, node: str, number: int, error: BaseException) -> None:
        """Damaged here, or dropped by retention: its reader has to look for another sender."""
        stream = self.streams.get(node)
        if stream is not None and stream.number == number:
            if not isinstance(error, NotFound):
                self.on_unreadable(error)
            self._drop(node, stream)

    def _drop(self, node: str, stream: _Stream) -> None:
        """Have a reader open its stream anew: it will be told to start over from a snapshot."""
        replica = self.replica
        del self.streams[node]
        replica.on_follower_lost(node, stream.number)
        refusal = Followed(
            replica.node, replica.epoch, stream.number, 0, replica.committed, refused=True
        )
        self.around.transport.send(node, self.key, refusal)

    # --- signs of life, and the watermark ---

    def send_sign(self, node: str, append: Append) -> None:
        """A slice without batches. It is not worth waiting for a connection that is full."""
        if self.around.transport.send_slice(node, self.key, append, []) and node in self.streams:
            self.streams[node].told = append.committed

    def on_commit(self) -> None:
        """Tell readers soon. All partitions do so at once: a node hears of them in one go."""
        if self._watermark is None:
            loop = asyncio.get_running_loop()
            when = (loop.time() // WATERMARK_S + 2) * WATERMARK_S
            self._watermark = loop.call_at(when, self._send_watermarks)

    def _send_watermarks(self) -> None:
        self._watermark = None
        coordinator = self.replica.coordinator
        if coordinator is None:
            return
        committed = coordinator.sequence_committed
        for node, stream in self.streams.items():
            if stream.told >= committed or stream.blocked or node not in coordinator.senders:
                continue
            self.send_sign(node, self.replica.append_to(node))


@dataclass(slots=True, eq=False)
class FollowerLog:
    """What it is told returns None when it is done, or the rest of the work, to be awaited."""

    key: Key
    replica: Replica
    log: PartitionLog
    around: Surroundings
    _: KW_ONLY
    flusher: Flusher
    applying: HeapApplier
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    perform: Callable[[Effects], None]
    _copying: asyncio.Task[None] | None = None

    # --- more of it ---

    def extend(self, batches: list[Batch]) -> Slow | None:
        for at, batch in enumerate(batches):
            if not self.flusher.has_room(batch.size):
                return self._write_with_room(batches[at:])
            self._stage(batch)
        self.flusher.flush()
        return None

    def _stage(self, batch: Batch) -> None:
        crash_point("node.follower.staging")
        try:
            self.log.stage(batch, received=True)
        except ValueError as error:  # the core has compared it: this can only be a fault of ours
            raise Corruption(f"a batch does not fit the log: {error}") from error

    async def _write_with_room(self, batches: list[Batch]) -> Effects:
        try:
            for batch in batches:
                self.flusher.flush()
                await self.flusher.make_room(batch.size, enqueue=False)
                self._stage(batch)
        except DiskFull as error:
            log.warning("a follower's disk is full", partition=self.key[1], error=error.message)
            # It may have been the end of a log that we took over: then we cannot.
            effects = self.replica.resign(self.around.now())
            return effects + self.replica.on_unwritten(self.log.sequence_last, self.around.now())
        finally:
            self.flusher.flush()
        return []

    # --- less of it ---

    async def truncate(self, sequence: int) -> Effects:
        """Raises `Corruption` if that must not be."""
        await self.applying.cut(sequence)
        crash_point("node.follower.cutting")
        try:
            await self.flusher.alone(lambda: self.log.truncate(sequence))
        except ValueError as error:
            raise Corruption(f"the log cannot be cut after {sequence}: {error}") from error
        self.applying.resume(self.log.sequence_committed)
        effects = self.replica.on_truncated(sequence, self.around.now())
        return effects + self.replica.on_durable(self.log.sequence_durable)

    # --- another one ---

    @property
    def copying(self) -> bool:
        return self._copying is not None

    def reseed(self, source: str) -> None:
        """Take a copy, beside everything else: it may take long, and promises do not wait."""
        self._copying = self.spawn(self._copy(source))

    async def _copy(self, source: str) -> None:
        await self.applying.drop()
        try:
            await self.around.transport.fetch_seed(source, self.key, self)
            await self.flusher.alone(self.log.finish_seeding)
        except (PenstockError, ValueError) as error:
            log.warning("a copy failed", source=source, error=str(error))
            await self.flusher.alone(lambda: empty(self.log))
            await asyncio.sleep(RETRY_S)
        facts = await asyncio.to_thread(facts_of, self.log)
        self._copying = None
        committed = self.log.sequence_committed
        self.applying.resume(committed)
        self.perform(self.replica.on_seeded(facts, committed, self.around.now()))

    async def abandon_copy(self) -> Effects:
        """The stream was left while a copy was made: what has come of it is of no use."""
        await self.stop()
        await self.flusher.alone(lambda: empty(self.log))
        self.applying.resume(0)
        # The replica tells nobody where its log ends until it hears that the log is whole again.
        return self.replica.on_seeded(LogFacts(), 0, self.around.now())

    async def stop(self) -> None:
        task, self._copying = self._copying, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    # --- the copy, as it comes: `ports.SeedTarget` ---

    async def begin(self, head: SeedHead) -> None:
        await self.flusher.alone(lambda: self._begin_copy(head))

    def _begin_copy(self, head: SeedHead) -> None:
        self.log.reset(first=head.first, chain=head.chain, epoch=head.epoch)
        if head.snapshot_sequence:
            self.log.install_snapshot(
                sequence=head.snapshot_sequence, chain=head.snapshot_chain,
                epoch=head.snapshot_epoch, parts=[head.snapshot],
            )  # fmt: skip

    async def write(self, batches: list[Batch]) -> None:
        for batch in batches:
            await self.flusher.make_room(batch.size, enqueue=False)
            self.log.stage(batch, received=True)
        await self.flusher.alone(self._write_staged)

    def _write_staged(self) -> None:
        flush = self.log.take()
        if flush is not None:
            self.log.write(flush)


@dataclass(slots=True, eq=False)
class Repair:
    replica: Replica
    _: KW_ONLY
    now: Callable[[], int]
    resign: Callable[[], None]
    renew: Callable[[], None]
    report: Callable[[Corruption], None]
    damage: str = ""  # what was found first
    _ask_ms: int = 0  # to be replaced, and not before
    _resign_ms: int = 0  # the same
    _resign_again_ms: int = RESIGN_AGAIN_MS

    def on_damage(self, error: Corruption, *, faulty: bool = False) -> None:
        """Some of the log cannot be read; `faulty`: what coordinating or lending it takes."""
        if faulty:
            self.replica.health = LogHealth.FAULTY
        elif self.replica.health is LogHealth.SOUND:
            self.replica.health = LogHealth.DAMAGED
        if not self.damage:
            self.damage = error.message
            self.report(error)

    def on_replaced(self) -> None:
        self.damage = ""

    def on_tick(self) -> None:
        if not self.damage:
            return
        now, coordinator = self.now(), self.replica.coordinator
        if coordinator is not None:
            if now >= self._resign_ms and coordinator.serving and coordinator.has_heir(now):
                self._resign_ms = now + self._resign_again_ms
                self._resign_again_ms = min(2 * self._resign_again_ms, RESIGN_AGAIN_MS_MAX)
                self.resign()
        elif now >= self._ask_ms and self.replica.replaceable(now):
            self._ask_ms = now + ASK_AGAIN_MS
            self.renew()
