"""One replica's folder: what is on the platter, and what the process believes it has written.

The log is a list of sealed batches. Work on it is a queue of operations, done one at a time as the
node's writer does them: append and sync, truncate, replace by a snapshot, retain. A crash leaves
the operations that were done, and of the first that was not a part: a prefix of the batches of an
append (what follows is torn and cut off at the next start), all or nothing of the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from penstock.model.batch import Batch
from penstock.replication.facts import LogFacts
from penstock.replication.sender import SendWindow
from verification.simulation.schedule import MS, Schedule

SLOW_SYNC_US: Final = (20 * MS, 900 * MS)


class Point(msgspec.Struct, frozen=True, gc=False):
    """An entry of a log, at which it ends or after which it begins."""

    sequence: int
    epoch: int
    chain: int
    time_ms: int


ORIGIN: Final = Point(0, 0, 0, 0)


def end_of(batch: Batch) -> Point:
    return Point(batch.first + batch.count - 1, batch.epoch, batch.chain, batch.time_ms)


class Snapshot(NamedTuple):
    at: Point
    data: bytes


@dataclass(slots=True)
class Platter:
    """What outlives the process."""

    uuid: str
    promised: int = 0
    base: Point = ORIGIN
    batches: list[Batch] = field(default_factory=list)
    snapshot: Snapshot | None = None
    floor: int = 0  # how far the log is known to be committed
    rotten: bool = False  # in a way that shows at the next start
    bad: int = 0  # a sequence that cannot be read any more; 0: none, or it is gone

    def empty(self) -> None:
        self.base, self.batches, self.snapshot, self.floor = ORIGIN, [], None, 0
        self.bad = 0

    def renew(self, uuid: str) -> None:
        """The copy cannot be trusted: begin a new one. The promise is kept."""
        self.uuid, self.rotten = uuid, False
        self.empty()

    @property
    def damaged(self) -> bool:
        return self.rotten or self.reads_bad(self.batches)

    def reads_bad(self, batches: list[Batch]) -> bool:
        """Whether one of these cannot be read here."""
        return self.bad > 0 and any(b.first <= self.bad <= b.last for b in batches)

    @property
    def replays_bad(self) -> bool:
        """Whether a process that starts would meet it: it reads what its snapshot does not hold."""
        return self.damaged and (self.snapshot is None or self.bad > self.snapshot.at.sequence)

    @property
    def last(self) -> int:
        return self.batches[-1].last if self.batches else self.base.sequence


@dataclass(slots=True)
class Append:
    batches: list[Batch]


@dataclass(slots=True)
class Cut:
    sequence: int
    done: Callable[[], None]


@dataclass(slots=True)
class Replace:
    """Drop everything; be what a snapshot and the batches after it say, or empty."""

    snapshot: Snapshot | None
    base: Point
    batches: list[Batch]
    done: Callable[[], None]


@dataclass(slots=True)
class Retain:
    """A snapshot is stored; what lies before `base` is not needed any more."""

    snapshot: Snapshot
    base: Point


Operation = Append | Cut | Replace | Retain


class FailedSync(Exception):
    """The disk did not take it. What of it is there, nobody knows."""


class Disk:
    """The process's end: `batches` is the log as all operations asked for will leave it."""

    def __init__(
        self,
        platter: Platter,
        schedule: Schedule,
        after: Callable[..., None],
        on_synced: Callable[[int], None],
        *,
        sync_us: tuple[int, int],
    ) -> None:
        self.platter = platter
        self.base, self.batches = platter.base, list(platter.batches)
        self._lasts = [batch.last for batch in self.batches]
        self.end = self._find_end()  # where the log ends
        self.slow = False
        self.fail_next = False
        self.full = False  # for what a follower is sent; a coordinator refuses in time
        self._sync_us = sync_us
        self._schedule, self._after, self._on_synced = schedule, after, on_synced
        self._operations: deque[Operation] = deque()
        self._under_way: Operation | None = None
        self._promises: list[int] = []  # being persisted
        self.committed = platter.floor  # persisted with the next sync

    # --- what is there ---

    def _find_end(self) -> Point:
        return end_of(self.batches[-1]) if self.batches else self.base

    def facts(self) -> LogFacts:
        """As a node finds them when it opens the log."""
        base = self.base
        runs = [(base.epoch, base.sequence)] if base.sequence else []
        for batch in self.batches:
            if not runs or runs[-1][0] != batch.epoch:
                runs.append((batch.epoch, batch.first))
        last = self.end.sequence
        return LogFacts(first=base.sequence + 1, last=last, durable=last, runs=runs)

    def read(self, first: int, *, through: int) -> list[Batch]:
        """All batches that lie whole between the two."""
        at, end = bisect_left(self._lasts, first), bisect_right(self._lasts, through)
        if at < end and self.batches[at].first < first:
            at += 1
        return self.batches[at:end]

    def read_some(self, window: SendWindow) -> list[Batch]:
        """What a reader may be sent, at least one batch if there is one."""
        entries, bytes = window.entries, window.bytes
        found = self.read(window.first, through=window.through)
        for at, batch in enumerate(found):
            count, size = batch.count, batch.size
            if at and (count > entries or size > bytes):
                return found[:at]
            entries -= count
            bytes -= size
            if entries <= 0 or bytes <= 0:
                return found[: at + 1]
        return found

    def batch_ending(self, sequence: int) -> Batch | None:
        at = bisect_left(self._lasts, sequence)
        if at == len(self._lasts) or self._lasts[at] != sequence:
            return None
        return self.batches[at]

    def batch_holding(self, sequence: int) -> Batch | None:
        at = bisect_left(self._lasts, sequence)
        if at == len(self._lasts) or self.batches[at].first > sequence:
            return None
        return self.batches[at]

    # --- operations ---

    def persist(self, promised: int, done: Callable[[int], None]) -> None:
        self._promises.append(promised)
        self._after(self._latency(), self._persisted, promised, done)

    def _persisted(self, promised: int, done: Callable[[int], None]) -> None:
        self._promises.remove(promised)
        self.platter.promised = max(self.platter.promised, promised)
        done(promised)

    def append(self, batches: list[Batch]) -> None:
        self.batches += batches
        self._lasts += [batch.first + batch.count - 1 for batch in batches]
        self.end = end_of(batches[-1])
        waiting = self._operations[-1] if self._operations else None
        if isinstance(waiting, Append):
            waiting.batches += batches  # shares the next sync
        else:
            self._push(Append(list(batches)))

    def cut(self, sequence: int, done: Callable[[], None]) -> None:
        while self._lasts and self._lasts[-1] > sequence:
            self.batches.pop()
            self._lasts.pop()
        self.end = self._find_end()
        self._push(Cut(sequence, done))

    def replace(
        self, snapshot: Snapshot | None, batches: list[Batch], done: Callable[[], None]
    ) -> None:
        self.base = ORIGIN if snapshot is None else snapshot.at
        self.batches = list(batches)
        self._lasts = [batch.last for batch in batches]
        self.end = self._find_end()
        self.committed = 0 if snapshot is None else snapshot.at.sequence
        self._push(Replace(snapshot, self.base, list(batches), done))

    def retain(self, snapshot: Snapshot, *, through: int) -> None:
        """Store a snapshot and forget whole batches up to `through`."""
        at = bisect_right(self._lasts, through)
        if at:
            self.base = end_of(self.batches[at - 1])
        del self.batches[:at]
        del self._lasts[:at]
        self.end = self._find_end()
        self._push(Retain(snapshot, self.base))

    def _push(self, operation: Operation) -> None:
        self._operations.append(operation)
        if self._under_way is None:
            self._start()

    def _start(self) -> None:
        self._under_way = self._operations.popleft()
        self._after(self._latency(), self._finish)

    def _latency(self) -> int:
        low, high = SLOW_SYNC_US if self.slow else self._sync_us
        return self._schedule.skewed(low, high)

    def _finish(self) -> None:
        operation = self._under_way
        assert operation is not None
        if self.fail_next and isinstance(operation, Append):
            raise FailedSync
        self._under_way = None
        self._store(operation)
        if self._operations:
            self._start()
        if isinstance(operation, Append):
            self._on_synced(operation.batches[-1].last)
        elif isinstance(operation, Cut | Replace):
            operation.done()

    def _store(self, operation: Operation) -> None:
        platter = self.platter
        if isinstance(operation, Append):
            platter.batches += operation.batches
        elif isinstance(operation, Cut):
            while platter.batches and platter.batches[-1].last > operation.sequence:
                platter.batches.pop()
        elif isinstance(operation, Replace):
            platter.empty()
            platter.snapshot, platter.base = operation.snapshot, operation.base
            platter.batches = list(operation.batches)
            platter.floor = operation.base.sequence
        else:
            platter.snapshot, platter.base = operation.snapshot, operation.base
            kept = [b for b in platter.batches if b.first > operation.base.sequence]
            platter.batches = kept
        if not isinstance(operation, Replace):
            platter.floor = max(platter.floor, min(self.committed, platter.last))

    # --- the end of the process ---

    def crash(self) -> int:
        """Leave on the platter what chance leaves there; returns how many batches were lost."""
        schedule, lost = self._schedule, 0
        for promised in self._promises:
            if schedule.chance(0.5):
                self.platter.promised = max(self.platter.promised, promised)
        operations = list(self._operations)
        if self._under_way is not None:
            operations.insert(0, self._under_way)
        for operation in operations:
            if isinstance(operation, Append):
                kept = schedule.between(0, len(operation.batches))
                self.platter.batches += operation.batches[:kept]
                lost = len(operation.batches) - kept
                if lost:
                    break
            elif schedule.chance(0.5):
                self._store(operation)
            else:
                break
        self._operations.clear()
        self._promises.clear()
        self._under_way = None
        return lost
