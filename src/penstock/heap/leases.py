"""Who holds which message, and until when.

A LEASE batch grants consecutive tokens, so leases are kept in runs: the tokens `[first, first +
n)` of one consumer, with the messages as an array and one byte per token that says whether it is
still held. Tokens only grow, so the runs are ordered and a token is found by bisection; settling
a stretch of tokens of one run is one array operation, however long it is.

Invariants: a token is held at most once and never again after it was settled; each run with a held
token has exactly one place in `_deadlines` or in `_overdue`, at or before its earliest deadline (an
extension only makes deadlines later, so a place may be early, never late).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint64]
DEAD_RUNS_MIN: Final = 64  # finished runs that may stay in the list before it is rebuilt


class LeaseRun:
    """Leases that one consumer got at once."""

    __slots__ = (
        "consumer", "deadline_ms", "deadlines", "first", "granted_ms", "held", "left", "messages",
        "visibility_ms",
    )  # fmt: skip

    def __init__(
        self, first: int, messages: Tokens, *, consumer: bytes, visibility_ms: int, granted_ms: int
    ) -> None:
        self.first, self.messages, self.consumer = first, messages, consumer
        self.visibility_ms, self.granted_ms = visibility_ms, granted_ms
        self.held = bytearray(b"\x01" * len(messages))
        self.left = len(messages)  # tokens still held
        self.deadline_ms = granted_ms + visibility_ms
        self.deadlines: NDArray[np.int64] | None = None  # per token, once one was extended

    def mask(self) -> NDArray[np.bool_]:
        return np.frombuffer(self.held, np.bool_)

    def earliest_ms(self) -> int:
        if self.deadlines is None:
            return self.deadline_ms
        return int(self.deadlines[self.mask()].min())

    def extend(self, offsets: slice | NDArray[np.int64], until_ms: NDArray[np.int64]) -> None:
        if self.deadlines is None:
            self.deadlines = np.full(len(self.held), self.deadline_ms, np.int64)
        self.deadlines[offsets] = np.maximum(self.deadlines[offsets], until_ms)

    def rearm(self, now_ms: int) -> None:
        """At least the full visibility from now; what an extension promised beyond it stays."""
        until_ms = now_ms + self.visibility_ms
        self.deadline_ms = max(self.deadline_ms, until_ms)
        if self.deadlines is not None:
            np.maximum(self.deadlines, until_ms, out=self.deadlines)

    def past(self, now_ms: int) -> NDArray[np.int64]:
        if self.deadlines is None:
            return np.flatnonzero(self.mask()) if self.deadline_ms <= now_ms else _NOBODY
        return np.flatnonzero(self.mask() & (self.deadlines <= now_ms))

    def overdue(self, offsets: slice | NDArray[np.int64], now_ms: int) -> int:
        if self.deadlines is None:
            return len(self.messages[offsets]) if self.deadline_ms <= now_ms else 0
        return int(np.count_nonzero(self.deadlines[offsets] <= now_ms))


class Stretch(NamedTuple):
    """Held tokens of one run: `offsets` into the run, `at` where they stand in the request."""

    run: LeaseRun
    offsets: slice | NDArray[np.int64]
    at: slice | NDArray[np.int64]
    size: int


_NOBODY: Final = np.empty(0, np.int64)


class LeaseBook:
    def __init__(self) -> None:
        self._firsts: list[int] = []  # first token of each run, ascending
        self._runs: list[LeaseRun] = []  # finished runs stay for a while
        self._dead_runs = 0
        self._deadlines: list[tuple[int, int]] = []  # heap of (deadline, first token)
        self._overdue: dict[int, LeaseRun] = {}
        self.by_consumer: dict[bytes, int] = {}  # held leases; no entry for none

    # --- changes ---

    def grant(self, run: LeaseRun) -> None:
        self._firsts.append(run.first)
        self._runs.append(run)
        heappush(self._deadlines, (run.earliest_ms(), run.first))
        self.by_consumer[run.consumer] = self.by_consumer.get(run.consumer, 0) + run.left

    def release(self, stretch: Stretch, released: dict[bytes, int]) -> Tokens:
        """End the leases of a stretch and count them in `released`; returns their messages."""
        run, offsets, _, count = stretch
        if isinstance(offsets, slice):
            run.held[offsets] = bytes(count)
        else:
            np.frombuffer(run.held, np.bool_)[offsets] = False
        run.left -= count
        if not run.left:
            self._retire()
        consumer = run.consumer
        released[consumer] = released.get(consumer, 0) + count
        left = self.by_consumer[consumer] - count
        if left:
            self.by_consumer[consumer] = left
        else:
            del self.by_consumer[consumer]
        return run.messages[offsets]

    def extend(self, tokens: Tokens, until_ms: NDArray[np.int64]) -> None:
        for run, offsets, at, _ in self.stretches(tokens):
            run.extend(offsets, until_ms[at])

    def rearm(self, now_ms: int) -> None:
        self._overdue.clear()
        for run in self.runs():
            run.rearm(now_ms)
        self._deadlines = [(run.earliest_ms(), run.first) for run in self.runs()]
        heapify(self._deadlines)

    def _retire(self) -> None:
        self._dead_runs += 1
        if self._dead_runs > DEAD_RUNS_MIN and 2 * self._dead_runs > len(self._runs):
            self._runs = [run for run in self._runs if run.left]
            self._firsts = [run.first for run in self._runs]
            self._dead_runs = 0

    # --- questions ---

    def runs(self) -> Iterator[LeaseRun]:
        return (run for run in self._runs if run.left)

    def run_of(self, token: int) -> LeaseRun | None:
        """The run that a token belongs to, whether or not it is still held."""
        i = bisect_right(self._firsts, token) - 1
        if i < 0:
            return None
        run = self._runs[i]
        return run if token < run.first + len(run.held) else None

    def stretches(self, tokens: Tokens) -> list[Stretch]:
        """The held ones among the tokens, each once, grouped by run."""
        count = len(tokens)
        if not count:
            return []
        first = int(tokens[0])
        run = self.run_of(first)
        start = first - run.first if run is not None else 0
        if (
            run is not None
            and int(tokens[-1]) == first + count - 1
            and start + count <= len(run.held)
            and run.held.count(1, start, start + count) == count
            and (count == 1 or (tokens[1:] > tokens[:-1]).all())
        ):
            return [Stretch(run, slice(start, start + count), slice(0, count), count)]
        return self._scattered(tokens)

    def _scattered(self, tokens: Tokens) -> list[Stretch]:
        ordered, at = np.unique(tokens, return_index=True)
        found: list[Stretch] = []
        done = 0
        while done < len(ordered):
            token = int(ordered[done])
            i = bisect_right(self._firsts, token) - 1
            end = len(ordered)
            if i + 1 < len(self._firsts):
                end = int(ordered.searchsorted(np.uint64(self._firsts[i + 1])))
            if i >= 0 and self._runs[i].left:
                stretch = _held_part(self._runs[i], ordered[done:end], at[done:end])
                if stretch.size:
                    found.append(stretch)
            done = end
        return found

    def expired(self, now_ms: int, limit: int) -> Tokens:
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, first = heappop(self._deadlines)
            run = self.run_of(first)
            if run is not None and run.left:
                self._overdue[first] = run
        found: list[NDArray[np.int64]] = []
        total = 0
        for first, run in list(self._overdue.items()):
            if total >= limit:
                break
            past = run.past(now_ms) if run.left else _NOBODY
            if len(past):
                found.append(past[: limit - total] + first)
                total += len(found[-1])
            else:
                del self._overdue[first]
                if run.left:
                    heappush(self._deadlines, (run.earliest_ms(), first))
        return np.concatenate(found).view(np.uint64) if found else np.empty(0, np.uint64)

    def next_ms(self) -> int | None:
        overdue = [run.earliest_ms() for run in self._overdue.values() if run.left]
        while self._deadlines:
            when, first = self._deadlines[0]
            run = self.run_of(first)
            if run is None or not run.left:
                heappop(self._deadlines)
            elif run.deadlines is not None and run.earliest_ms() > when:
                heapreplace(self._deadlines, (run.earliest_ms(), first))
            else:
                return min([when, *overdue])
        return min(overdue, default=None)

    def tokens_of(self, messages: set[int]) -> Tokens:
        """The tokens under which these messages are leased; looks through all leases."""
        found = [
            run.first + i
            for run in self.runs()
            for i, message in enumerate(run.messages.tolist())
            if run.held[i] and message in messages
        ]
        return np.array(found, np.uint64)

    # --- checks ---

    def validate(self) -> None:
        assert self._firsts == [run.first for run in self._runs]
        assert all(a < b for a, b in zip(self._firsts, self._firsts[1:], strict=False))
        totals: dict[bytes, int] = {}
        placed = dict.fromkeys(self._overdue, -1)
        for when, first in self._deadlines:
            run = self.run_of(first)
            if run is not None and run.left:
                assert first not in placed, "a run has two places"
                placed[first] = when
        for run in self.runs():
            assert run.left == run.held.count(1), "a run's count is off"
            assert placed[run.first] <= run.earliest_ms(), "a run's deadline is noticed late"
            totals[run.consumer] = totals.get(run.consumer, 0) + run.left
        assert totals == self.by_consumer, "a consumer's count is off"


def _held_part(run: LeaseRun, tokens: Tokens, at: NDArray[np.int64]) -> Stretch:
    """Which of the ascending tokens, all at or past the run's first, it still holds."""
    # A caller may name any token, so the subtraction comes before they are taken for signed.
    within = tokens - np.uint64(run.first)
    offsets = within[: int(within.searchsorted(np.uint64(len(run.held))))].view(np.int64)
    good = run.mask()[offsets]
    if good.all():
        return Stretch(run, offsets, at[: len(offsets)], len(offsets))
    return Stretch(run, offsets[good], at[: len(good)][good], int(np.count_nonzero(good)))
