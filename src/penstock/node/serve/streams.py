"""Credit-controlled streams out of a node: leases for consumers, batches for log readers.

A stream has a window and an amount that is out. It may send while the amount out fits the window;
nothing is queued for it meanwhile, so a slow reader costs the node its window and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Final, Protocol

from penstock.errors import InvalidArgument, NotFound, PenstockError
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.model.columns import Buffer
from penstock.wire.limits import bounded
from penstock.wire.messages import Delivery, LogSlice

WINDOW_ENTRIES_MAX: Final = 1_000_000
WINDOW_BYTES_MAX: Final = 256 << 20
SLICE_BYTES_MAX: Final = 1 << 20  # log batches sent in one frame


def gone(sequence: int, *, sequence_first: int) -> NotFound:
    """The refusal to read what retention has dropped; it says from where on there is something."""
    return NotFound(
        f"sequence {sequence} is gone: the log starts at {sequence_first}",
        sequence_first=sequence_first,
    )


def check_window(entries: int, bytes_: int) -> None:
    """Raise unless a reader may ask for this much."""
    bounded(entries, 1, WINDOW_ENTRIES_MAX, "credit_entries")
    bounded(bytes_, 1, WINDOW_BYTES_MAX, "credit_bytes")


class LogSource(Protocol):
    """A replica whose log may be read, as far as it is committed."""

    @property
    def log(self) -> PartitionLog: ...

    @property
    def sequence_readable(self) -> int: ...


class SendRoom(Protocol):
    """Where the bytes count that are read in order to be sent."""

    def take(self, size: int) -> bool:
        """Whether so much may be read now. If not, the stream is pumped again when it may."""

    def give_back(self, size: int) -> None:
        """What was taken is sent, or not sent after all."""


@dataclass(slots=True, eq=False)
class ConsumerStream:
    """Messages leased to one consumer. `out` counts leases that are not yet settled."""

    consumer: bytes
    _: KW_ONLY
    window: int
    batch_max: int
    visibility_ms: int | None
    send: Callable[[Delivery, Buffer], None]
    key_id: str | None = None
    # Told when what was leased does not come: it cannot be read, or may not be leased at all.
    fail: Callable[[PenstockError], None] | None = None
    changed: Callable[[], None] | None = None  # told when less is out, or `away` is other
    out: int = 0
    away: int = 0  # the same, of messages that other nodes have leased to it
    open: bool = True
    blocked: bool = False  # the connection's send buffer is full
    unreadable: int = 0  # messages that were leased to it and became dead letters instead

    def room(self, leases_max: int) -> int:
        if self.blocked or not self.open:
            return 0
        return min(self.window, leases_max) - self.out - self.away

    def on_leased(self, count: int) -> None:
        self.out += count

    def on_released(self, count: int) -> None:
        """Leases ended durably: their credit comes back."""
        self.recount(self.out - count)
        if self.out < 0:
            raise RuntimeError(f"stream {self.consumer!r} got back more credit than it gave")

    def recount(self, out: int) -> None:
        """So many leases are out: some ended, or went with a partition that moved."""
        self.out = out
        if self.changed is not None:
            self.changed()

    def on_away(self, change: int) -> None:
        """Other nodes have leased more to it, or some of that has ended."""
        self.away += change
        if self.changed is not None:
            self.changed()

    def grant(self, entries: int) -> None:
        self.window += entries
        if not 0 < self.window <= WINDOW_ENTRIES_MAX:
            raise InvalidArgument(
                f"a stream's credit must be from 1 to {WINDOW_ENTRIES_MAX}",
                field="credits",
                limit=WINDOW_ENTRIES_MAX,
            )


@dataclass(slots=True, eq=False)
class ReaderStream:
    """Committed batches of one partition from a cursor on, verbatim."""

    source: LogSource
    _: KW_ONLY
    partition: int
    cursor: int
    window_entries: int
    window_bytes: int
    send: Callable[[LogSlice, list[Buffer]], None]
    fail: Callable[[BaseException], None]
    end: Callable[[], None]
    send_room: SendRoom
    through: int | None = None  # the batch that covers it is the last; None: there is none
    open: bool = True
    blocked: bool = False
    entries_out: int = 0
    bytes_out: int = 0
    reading: bool = False

    def acknowledge(self, entries: int, bytes_: int) -> None:
        """The reader took this much: its credit comes back."""
        if not (0 <= entries <= self.entries_out and 0 <= bytes_ <= self.bytes_out):
            raise InvalidArgument("more credit returned than is out", field="entries")
        self.entries_out -= entries
        self.bytes_out -= bytes_

    def pump(self) -> None:
        """Send what is committed and fits the credit, as far as there is room for it."""
        while self._may_send(sequence_committed := self.source.sequence_readable):
            room = min(SLICE_BYTES_MAX, max(1, self.window_bytes - self.bytes_out))
            taken = 0
            try:
                # A segment that is not open tells no size: its first slice may have more.
                size = self.source.log.reader.slice_size(
                    self.cursor, through=sequence_committed, bytes_max=room
                )
                wanted = SLICE_BYTES_MAX if size is None else size
                if not self.send_room.take(wanted):
                    return
                taken = wanted
                batches = self.source.log.reader.read_slice(
                    self.cursor, through=sequence_committed, bytes_max=room, nowait=True
                )
            except PenstockError as error:  # dropped by retention, or damaged
                self.send_room.give_back(taken)
                self.fail(error)
                return
            if batches is None:
                self._read_cold(sequence_committed, room, taken=taken)
                return
            if not self._send_slice(batches, sequence_committed, taken=taken):
                return

    def _may_send(self, sequence_committed: int) -> bool:
        return (
            self.open
            and not self.blocked
            and not self.reading
            and self.cursor <= sequence_committed
            and (self.bytes_out < self.window_bytes or not self.bytes_out)
        )

    def _send_slice(self, batches: list[Batch], sequence_committed: int, *, taken: int) -> bool:
        """Send the leading batches that the credit covers, and give back what was taken for them.
        A batch that comes when nothing is out may exceed the window, in entries and bytes. Whether
        something was sent, and more may follow."""
        fitting: list[Buffer] = []
        entries, size, last = self.entries_out, self.bytes_out, 0
        for batch in batches:
            padded = batch.size + (-batch.size & 7)
            if entries and entries + batch.count > self.window_entries:
                break
            if size and size + padded > self.window_bytes:
                break
            if self.through is not None and batch.first > self.through:
                break
            fitting += [batch.header, batch.body, bytes(padded - batch.size)]
            entries, size, last = entries + batch.count, size + padded, batch.last
        try:
            if fitting:
                self.entries_out, self.bytes_out = entries, size
                about = LogSlice(self.partition, batches[0].first, last, sequence_committed)
                self.send(about, fitting)
                self.cursor = last + 1
        finally:
            self.send_room.give_back(taken)
        if self.through is not None and last >= self.through:
            self.end()
            return False
        return bool(fitting)

    def _read_cold(self, sequence_committed: int, bytes_max: int, *, taken: int) -> None:
        """The page cache misses: read in a thread, then go on."""
        self.reading = True
        future = asyncio.get_running_loop().run_in_executor(
            None,
            lambda: self.source.log.reader.read_slice(
                self.cursor, through=sequence_committed, bytes_max=bytes_max, nowait=False
            ),
        )

        def done(future: asyncio.Future[list[Batch] | None]) -> None:
            self.reading = False
            error = future.exception()
            if error is not None or not self.open:
                self.send_room.give_back(taken)
                if error is not None and self.open:
                    self.fail(error)
            elif self._send_slice(future.result() or [], sequence_committed, taken=taken):
                self.pump()  # more may be committed by now

        future.add_done_callback(done)
