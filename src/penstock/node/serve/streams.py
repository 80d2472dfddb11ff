"""Credit-controlled streams out of a node: leases for consumers, batches for log readers.

A stream has a window and an amount that is out. It may send while the amount out fits the window;
nothing is queued for it meanwhile, so a slow reader costs the node its window and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from itertools import takewhile
from typing import Final, Protocol

from penstock.errors import InvalidArgument, NotFound, PenstockError
from penstock.log.partition import PartitionLog
from penstock.model.batch import Batch
from penstock.model.columns import Buffer
from penstock.node.door.flow import Outlet
from penstock.node.storage.log_io import SliceReader, covered
from penstock.replication.sender import Credit
from penstock.wire.messages import Delivery, LogSlice, bounded

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
    bounded(entries, 1, WINDOW_ENTRIES_MAX, "credit_entries")
    bounded(bytes_, 1, WINDOW_BYTES_MAX, "credit_bytes")


class LogSource(Protocol):
    """A replica whose log may be read, as far as it is committed."""

    @property
    def log(self) -> PartitionLog: ...

    @property
    def sequence_readable(self) -> int: ...


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
    credit: Credit
    send: Callable[[LogSlice, list[Buffer]], None]
    fail: Callable[[BaseException], None]
    end: Callable[[], None]
    send_room: Outlet
    through: int | None = None  # the batch that covers it is the last; None: there is none
    open: bool = True
    blocked: bool = False
    _taken: int = 0  # of the room to send, for the slice that is being read
    _reader: SliceReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = SliceReader(self.source.log, self._on_failed, staged=False)

    def pump(self) -> None:
        """Send what is committed and fits the credit, as far as there is room for it."""
        reader = self._reader
        while self._may_send(sequence_committed := self.source.sequence_readable):
            bytes_max = min(SLICE_BYTES_MAX, self.credit.bytes)
            size = reader.size(self.cursor, through=sequence_committed, bytes_max=bytes_max)
            # A segment that is not open tells no size: its first slice may have more.
            self._taken = SLICE_BYTES_MAX if size is None else size
            if not self.send_room.take(self._taken):
                return
            batches = reader.read(
                self.cursor, through=sequence_committed, bytes_max=bytes_max, then=self._on_read
            )
            if batches is None or not self._send_slice(batches):
                return

    def _may_send(self, sequence_committed: int) -> bool:
        return (
            self.open
            and not self.blocked
            and not self._reader.busy
            and self.cursor <= sequence_committed
            and not self.credit.exhausted
        )

    def _on_read(self, batches: list[Batch]) -> None:
        if not self.open:
            self.send_room.give_back(self._taken)
        elif self._send_slice(batches):
            self.pump()  # more may be committed by now

    def _on_failed(self, error: BaseException) -> None:
        self.send_room.give_back(self._taken)
        if self.open:
            self.fail(error)

    def _send_slice(self, batches: list[Batch]) -> bool:
        """Send the leading batches that the credit covers; if nothing is out, the first of them may
        exceed the window. Whether something was sent, and more may follow."""
        credit, through = self.credit, self.through
        wanted = takewhile(lambda batch: through is None or batch.first <= through, batches)
        fitting, entries, size = covered(
            wanted, entries=credit.entries, bytes=credit.bytes, lone=not credit.bytes_out, align=8
        )
        try:
            if fitting:
                credit.on_sent(entries, size)
                last = fitting[-1].last
                committed = self.source.sequence_readable
                about = LogSlice(self.partition, fitting[0].first, last, committed)
                self.send(about, [part for batch in fitting for part in _padded(batch)])
                self.cursor = last + 1
        finally:
            self.send_room.give_back(self._taken)
        if fitting and through is not None and self.cursor > through:
            self.end()
            return False
        return bool(fitting)


def _padded(batch: Batch) -> tuple[Buffer, Buffer, Buffer]:
    return batch.header, batch.body, bytes(-batch.size & 7)
