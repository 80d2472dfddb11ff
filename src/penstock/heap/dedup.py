"""Which entries a producer has already enqueued, exactly, and as which message.

A producer numbers its entries. Per producer this keeps *places*: intervals of producer sequences
with the message sequence and time they were given, disjoint and ascending. An entry is a
duplicate exactly if a place covers it; its message is then found by subtraction.

Time here is log time (the time of batches), so every replica forgets at the same point of the log.

Bounds, all applied inside `record` and so deterministic:
- A place older than `dedup_ms` is forgotten, and so is a producer that has been silent for that
  long.
- Past `PLACES_MAX` places of one producer its lowest quarter is folded into the *archive*:
  intervals without message ids, merged where they touch. A duplicate found there is still
  recognised, but its id is no longer known (sequence 0). The archive ages as one: it lives until
  its youngest entry expires.
- Past `PLACES_TOTAL_MAX` places of all producers together, the producers with the most are folded
  first.
- Past `ARCHIVE_MAX` intervals of one archive the lowest half is forgotten; past `PRODUCERS_MAX`
  producers the one that has been silent longest is. Those, and only those, may be enqueued again.

A producer that starts anew raises its epoch: a lower epoch is refused, a higher one starts afresh.
That is known here from the first entry of the new epoch on, or from a record of it (`begin`);
either is forgotten with the producer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import pairwise
from typing import Any, Final, NamedTuple

from penstock.errors import Corruption, InvalidArgument, StaleProducer
from penstock.model.columns import Columns
from penstock.model.entries import PRODUCER_NUMBER_MAX

PLACES_MAX: Final = 1 << 15
PLACES_TOTAL_MAX: Final = 1 << 18
ARCHIVE_MAX: Final = 1 << 12
PRODUCERS_MAX: Final = 10_000
EXPIRE_SOON: Final = 256  # a producer with at most so many places forgets each when it expires
EXPIRE_SHARE: Final = 8  # a producer with more places forgets an eighth of them together
UNKNOWN: Final = (0, 0)  # message sequence and time of a duplicate known only from the archive


class ProducerRun(NamedTuple):
    """A stretch of a body's entries with one producer; `start` is where it begins in the body."""

    producer: bytes
    epoch: int
    first: int  # producer sequence
    size: int
    start: int


def producer_runs(columns: Columns) -> list[ProducerRun]:
    """The stretches of entries that have a producer. Numbers that no node takes any more, as no
    snapshot could hold what follows from them, stand for none."""
    names, blob = columns.views.get("run_producer"), columns.blobs.get("run_producer")
    if names is None or blob is None:
        return []
    absent = [0] * columns.runs
    epochs = columns.views.get("run_epoch", absent)
    firsts = columns.views.get("run_sequence", absent)
    runs = []
    start = 0
    for i, size in enumerate(columns.views.get("run_count", absent)):
        name, epoch, first = bytes(blob[names[i] : names[i + 1]]), epochs[i], firsts[i]
        if name and size and first + size <= PRODUCER_NUMBER_MAX >= epoch:
            runs.append(ProducerRun(name, epoch, first, size, start))
        start += size
    if start > columns.count:
        raise InvalidArgument(
            f"runs cover {start} of {columns.count} entries", field="run_count", limit=columns.count
        )
    return runs


def _reject_twins(runs: list[ProducerRun]) -> None:
    """Refuse a body that has one producer's sequence twice: neither came first."""
    ordered = sorted((r.producer, r.epoch, r.first, r.size) for r in runs)
    for one, two in pairwise(ordered):
        if one[:2] == two[:2] and two[2] < one[2] + one[3]:
            raise InvalidArgument(
                f"producer sequence {two[2]} is in one request twice", field="run_sequence"
            )


class ProducerHistory:
    __slots__ = (
        "archive", "archive_ms", "columns", "counts", "epoch", "firsts", "last_ms", "messages",
        "next", "times_ms",
    )  # fmt: skip

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.last_ms = 0  # time of its last entry
        self.next = 0  # one past the highest producer sequence ever seen: from here all is fresh
        self.firsts = array("Q")
        self.counts = array("Q")
        self.messages = array("Q")
        self.times_ms = array("q")
        self.columns = (self.firsts, self.counts, self.messages, self.times_ms)
        self.archive: list[tuple[int, int]] = []  # [first, end) ascending, disjoint, not touching
        self.archive_ms = 0

    def find(self, sequence: int) -> tuple[int, int] | None:
        """Message sequence and time of an entry; UNKNOWN from the archive; None if it is fresh."""
        i = bisect_right(self.firsts, sequence) - 1
        if i >= 0 and sequence - self.firsts[i] < self.counts[i]:
            return self.messages[i] + sequence - self.firsts[i], self.times_ms[i]
        i = bisect_right(self.archive, (sequence, _END)) - 1
        if i >= 0 and sequence < self.archive[i][1]:
            return UNKNOWN
        return None

    def add(self, first: int, count: int, *, message: int, time_ms: int) -> int:
        """Place consecutive entries, those that have none yet; returns the change in places."""
        before = len(self.firsts)
        if first < self.next:
            self._fill(first, count, message, time_ms)
        elif (
            before
            and self.firsts[-1] + self.counts[-1] == first
            and self.messages[-1] + self.counts[-1] == message
            and self.times_ms[-1] == time_ms
        ):
            self.counts[-1] += count
        else:
            for column, value in zip(self.columns, (first, count, message, time_ms), strict=True):
                column.append(value)
        self.next = max(self.next, first + count)
        self.last_ms = time_ms
        return len(self.firsts) - before

    def _fill(self, first: int, count: int, message: int, time_ms: int) -> None:
        """Place entries of which some may have a place."""
        i = 0
        while i < count:
            if self.find(first + i) is not None:
                i += 1
                continue
            n = 1
            while i + n < count and self.find(first + i + n) is None:
                n += 1
            at = bisect_right(self.firsts, first + i)
            place = (first + i, n, message + i, time_ms)
            for column, value in zip(self.columns, place, strict=True):
                column.insert(at, value)
            i += n

    def remove(self, first: int, count: int, *, message: int) -> int:
        """Forget places that were given to these messages. Returns the change in places."""
        before = len(self.firsts)
        end = first + count
        kept = [place for i in range(before) for place in self._without(i, first, end, message)]
        self._replace(kept)
        return len(self.firsts) - before

    def _without(
        self, i: int, first: int, end: int, message: int
    ) -> list[tuple[int, int, int, int]]:
        start, n, given, when = self.firsts[i], self.counts[i], self.messages[i], self.times_ms[i]
        low, high = max(start, first), min(start + n, end)
        if low >= high or given - start != message - first:
            return [(start, n, given, when)]
        pieces = [
            (start, low - start, given, when),
            (high, start + n - high, given + high - start, when),
        ]
        return [piece for piece in pieces if piece[1]]

    def _replace(self, places: list[tuple[int, int, int, int]]) -> None:
        for i, column in enumerate(self.columns):
            column[:] = array(column.typecode, [place[i] for place in places])

    def expire(self, before_ms: int) -> int:
        """Forget what is older than `before_ms`; returns the change in places."""
        if self.archive and self.archive_ms < before_ms:
            self.archive = []
        if not self.times_ms or self.times_ms[0] >= before_ms:
            return 0
        have = len(self.times_ms)
        # Cutting moves the rest of the columns: of a long list cut an eighth at once or nothing.
        least = have // EXPIRE_SHARE if have > EXPIRE_SOON else 0
        if self.times_ms[least] >= before_ms:
            return 0
        gone = least
        while gone < have and self.times_ms[gone] < before_ms:
            gone += 1
        self._cut(gone)
        return -gone

    def fold(self) -> int:
        """Move the lowest quarter of the places into the archive; returns the change in places."""
        some = max(1, len(self.firsts) // 4)
        merged: list[tuple[int, int]] = []
        ends = [(f, f + c) for f, c in zip(self.firsts[:some], self.counts[:some], strict=True)]
        for first, end in sorted(self.archive + ends):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        if len(merged) > ARCHIVE_MAX:
            merged = merged[len(merged) // 2 :]
        self.archive = merged
        self.archive_ms = max(self.archive_ms, *self.times_ms[:some])
        self._cut(some)
        return -some

    def _cut(self, count: int) -> None:
        for column in self.columns:
            del column[:count]

    def validate(self) -> None:
        ends = [f + c for f, c in zip(self.firsts, self.counts, strict=True)]
        assert all(self.counts), "an empty place"
        assert all(e <= f for e, f in zip(ends, self.firsts[1:], strict=False)), "places overlap"
        assert all(a[1] < b[0] for a, b in zip(self.archive, self.archive[1:], strict=False))
        assert not ends or ends[-1] <= self.next
        assert len(self.firsts) <= PLACES_MAX
        assert len(self.archive) <= ARCHIVE_MAX


_END: Final = 1 << 64


class Dedup:
    def __init__(self) -> None:
        self.producers: dict[bytes, ProducerHistory] = {}  # in order of their last entry
        self.places = 0

    def epoch_of(self, producer: bytes) -> int | None:
        found = self.producers.get(producer)
        return None if found is None else found.epoch

    def admit(self, columns: Columns) -> list[tuple[int, int, int]]:
        """Entries of an ENQ or PREPARE body that are here already: (index, sequence, time_ms).

        Sequence and time are 0 for a duplicate whose message id is no longer kept. Raises
        `StaleProducer` for an old epoch, `InvalidArgument` for a body that repeats itself.
        """
        found: list[tuple[int, int, int]] = []
        runs = producer_runs(columns)
        if len(runs) > 1:
            _reject_twins(runs)
        for name, epoch, first, count, index in runs:
            producer = self.producers.get(name)
            if producer is None or epoch > producer.epoch:
                continue
            if epoch < producer.epoch:
                raise StaleProducer(
                    f"producer epoch {epoch} is over, {producer.epoch} is current",
                    epoch=producer.epoch,
                )
            for i in range(min(count, producer.next - first)):
                place = producer.find(first + i)
                if place is not None:
                    found.append((index + i, *place))
        return found

    def record(self, runs: list[ProducerRun], *, message: int, time_ms: int, dedup_ms: int) -> None:
        before_ms = time_ms - dedup_ms
        for producer, epoch, first, count, start in runs:
            known = self._entered(producer, epoch)
            if known is None:
                continue
            self.places += known.expire(before_ms)
            self.places += known.add(first, count, message=message + start, time_ms=time_ms)
            while len(known.firsts) > PLACES_MAX:
                self.places += known.fold()
            if self.places > PLACES_TOTAL_MAX:
                self._fold_largest()
            self._forget_silent(before_ms)

    def begin(self, producer: bytes, epoch: int, *, time_ms: int, dedup_ms: int) -> None:
        """Refuse lower epochs of a producer from now on, though nothing of this one is here yet."""
        known = self._entered(producer, epoch)
        if known is not None:
            known.last_ms = time_ms
            self._forget_silent(time_ms - dedup_ms)

    def _entered(self, producer: bytes, epoch: int) -> ProducerHistory | None:
        """The producer in its epoch, as the one that was heard of last; None: the epoch is over."""
        known = self.producers.pop(producer, None)
        if known is not None and epoch < known.epoch:
            self.producers[producer] = known
            return None
        if known is None or epoch > known.epoch:
            self.places -= 0 if known is None else len(known.firsts)
            known = ProducerHistory(epoch)
        self.producers[producer] = known
        return known

    def retract(self, run: ProducerRun, *, message: int) -> None:
        """Undo `record`: the messages from `message` on were prepared and then aborted."""
        known = self.producers.get(run.producer)
        if known is not None and known.epoch == run.epoch:
            self.places += known.remove(run.first, run.size, message=message)
            # `next` stays: entries that are fresh again may lie anywhere below it.

    def _fold_largest(self) -> None:
        enough = PLACES_TOTAL_MAX * 7 // 8  # the next fold is far away then
        for producer in sorted(self.producers.values(), key=lambda p: -len(p.firsts)):
            if self.places <= enough:
                return
            self.places += producer.fold()

    def _forget_silent(self, before_ms: int) -> None:
        while self.producers:
            name = next(iter(self.producers))
            oldest = self.producers[name]
            if oldest.last_ms >= before_ms and len(self.producers) <= PRODUCERS_MAX:
                return
            self.places -= len(oldest.firsts)
            del self.producers[name]

    # --- snapshots and checks ---

    def dump(self) -> list[Any]:
        return [
            [
                name, p.epoch, p.last_ms, p.next, *[column.tobytes() for column in p.columns],
                p.archive, p.archive_ms,
            ]
            for name, p in self.producers.items()
        ]  # fmt: skip

    @staticmethod
    def load(rows: list[Any]) -> Dedup:
        found = Dedup()
        for name, epoch, last_ms, following, *columns, archive, archive_ms in rows:
            producer = found.producers[name] = ProducerHistory(epoch)
            producer.last_ms, producer.next = last_ms, following
            for column, data in zip(producer.columns, columns, strict=True):
                column.frombytes(data)
            if len(set(map(len, producer.columns))) != 1:
                raise Corruption("a producer's columns differ in length")
            producer.archive = [(first, end) for first, end in archive]
            producer.archive_ms = archive_ms
            found.places += len(producer.firsts)
        return found

    def validate(self) -> None:
        assert self.places == sum(len(p.firsts) for p in self.producers.values())
        assert len(self.producers) <= PRODUCERS_MAX
        times = [p.last_ms for p in self.producers.values()]
        assert times == sorted(times), "producers are out of order"
        for producer in self.producers.values():
            producer.validate()
