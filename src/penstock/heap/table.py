"""The states of a message, and what is known of each living one, in columns addressed by sequence.

            ┌────────────► PREPARED ──┐ commit                ┌──► DEAD ──► READY (replay), DONE
            │                 │ abort  ▼                       │
    NONE ───┼─► READY ◄── DELAYED ◄───┴── back ── LEASED ◄─────┼── READY, DELAYED
            └─► DELAYED       due                    │         │
                                                     └─────────┴──► DONE

`NONE` is a sequence that never was a message, or whose message is long done and forgotten. `DONE`
is the same for as long as its page is kept. Nothing leads out of `DONE`.

Whether a waiting message is `DELAYED` or already `READY` depends on the clock of whoever asks,
not on the log: both mean *waiting until `not_before_ms`*, and a replica that was never asked
still calls a message delayed that another has found due. So they count as one state wherever
replicas are compared.

Sequences are cut into pages of 4096. A page that holds a living message owns one row of the pool;
all columns of the pool are flat arrays in which row *r* is `[r * 4096, (r + 1) * 4096)`. A
sequence becomes a flat position by one lookup (`page -> row`), so any number of scattered
messages is read or written in a handful of array operations. A page whose last message is done
gives its row back: memory follows the living messages, not the history.

Invariants: row 0 belongs to no page and stays all `NONE`, so a sequence outside every page reads
as `NONE` without a test; a free row is all zero; `living[row]` counts the row's living messages;
every change of a state goes through `enter` or `move`, which keep `counts` and refuse what
`ALLOWED` does not list.

How a priority becomes a key: smaller keys are delivered first. MIN orders by the priority itself,
MAX by its bitwise complement, which reverses int64 without an overflow. Ageing lets every waiting
message gain the same amount per second; the differences between messages then never change, so it
is enough to add the enqueue time, once, at the same rate: the key is static, and a message that
came a second later stands that much behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption
from penstock.model.topic import Mode, TopicConfig

PAGE_BITS: Final = 12
PAGE: Final = 1 << PAGE_BITS
OFFSET: Final = PAGE - 1
ROWS_MIN: Final = 2  # row 0 and one page: most partitions are small
PAGES_MIN: Final = 64
KEY_MAX: Final = (1 << 63) - 1
SCAN_PAGES: Final = 64  # pages looked at in one step of a scan
Sequences = NDArray[np.uint64]
Places = NDArray[np.int64]
Opened = list[tuple[slice | Places, slice]]


class MessageState(IntEnum):
    NONE = 0
    READY = 1
    DELAYED = 2
    LEASED = 3
    DEAD = 4
    PREPARED = 5
    DONE = 6


STATES: Final = len(MessageState)

# From each state (row) to the states it may become.
FOLLOWS: Final[dict[MessageState, frozenset[MessageState]]] = {
    MessageState.NONE: frozenset({MessageState.READY, MessageState.DELAYED, MessageState.PREPARED}),
    MessageState.READY: frozenset({MessageState.LEASED, MessageState.DEAD, MessageState.DONE}),
    MessageState.DELAYED: frozenset(
        {MessageState.READY, MessageState.LEASED, MessageState.DEAD, MessageState.DONE}
    ),
    MessageState.LEASED: frozenset(
        {MessageState.READY, MessageState.DELAYED, MessageState.DEAD, MessageState.DONE}
    ),
    MessageState.DEAD: frozenset({MessageState.READY, MessageState.DONE}),
    MessageState.PREPARED: frozenset({MessageState.READY, MessageState.DELAYED, MessageState.DONE}),
    MessageState.DONE: frozenset(),
}

# The same by target: ALLOWED[to][from].
ALLOWED: Final = tuple(tuple(to in FOLLOWS[start] for start in MessageState) for to in MessageState)

ALIVE: Final = frozenset(MessageState) - {MessageState.NONE, MessageState.DONE}
WAITING: Final = frozenset({MessageState.READY, MessageState.DELAYED})


def mask_of(states: frozenset[MessageState]) -> NDArray[np.bool_]:
    """A lookup table: `mask_of(states)[state]`."""
    return np.array([state in states for state in MessageState])


def reject_transition(start: int, to: MessageState) -> Corruption:
    """A log that asks for this was not written by this machine."""
    return Corruption(f"a message cannot go from {MessageState(start).name} to {to.name}")


_ALIVE: Final = mask_of(ALIVE)


class Ordering:
    __slots__ = ("_ageing_per_s", "_reversed")

    def __init__(self, config: TopicConfig) -> None:
        self._reversed = config.mode is Mode.MAX
        self._ageing_per_s = config.ageing_per_s

    def keys(self, priorities: NDArray[np.int64]) -> NDArray[np.int64]:
        """Keys without ageing; also turns such keys back into priorities."""
        return ~priorities if self._reversed else priorities

    def aged(self, keys: NDArray[np.int64], times_ms: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Keys as the index orders them; saturating at the worst key."""
        if not self._ageing_per_s:
            return keys
        # Rate and time are bounded such that the product fits (see model.topic.BOUNDS).
        lateness = (
            times_ms // 1000 * self._ageing_per_s + times_ms % 1000 * self._ageing_per_s // 1000
        )
        return np.where(keys > KEY_MAX - lateness, KEY_MAX, keys + lateness)

    def key_one(self, priority: int, time_ms: int) -> tuple[int, int]:
        """The key of one message without ageing, and as the index orders it."""
        key = ~priority if self._reversed else priority
        return key, min(KEY_MAX, key + self._ageing_per_s * time_ms // 1000)


class MessageTable:
    """Columns: state; key (priority as it orders, without ageing); attempts; limit (0: the topic's
    max_retries, else one more than the message's own); time_ms (of enqueue); until_ms (waiting: not
    before, dead: since); reason (dead)."""

    COLUMNS: Final = {
        "state": np.uint8,
        "key": np.int64,
        "attempts": np.uint16,
        "limit": np.int16,
        "time_ms": np.int64,
        "until_ms": np.int64,
        "reason": np.uint8,
    }

    state: NDArray[np.uint8]
    key: NDArray[np.int64]
    attempts: NDArray[np.uint16]
    limit: NDArray[np.int16]
    time_ms: NDArray[np.int64]
    until_ms: NDArray[np.int64]
    reason: NDArray[np.uint8]

    def __init__(self) -> None:
        self.counts = [0] * STATES  # messages in each state; NONE and DONE are not kept
        self.living = np.zeros(ROWS_MIN, np.int64)
        for name, dtype in self.COLUMNS.items():
            setattr(self, name, np.zeros(ROWS_MIN * PAGE, dtype))
        self._free = list(range(ROWS_MIN - 1, 0, -1))
        self._page_by_row = [-1] * ROWS_MIN
        # _row_of[page - _page_zero]; the first and last cell stay 0, so that a clipped lookup of
        # a page beyond either end finds row 0.
        self._row_of = np.zeros(PAGES_MIN + 2, np.int64)
        self._page_zero = -1
        self._page_tail = -1  # where messages enter; kept even when nothing in it lives
        self._refresh_views()

    # --- places ---

    def places(self, sequences: Sequences) -> Places:
        """Flat positions; a sequence that is not here gets a position of row 0."""
        signed = sequences.view(np.int64)
        pages = signed >> PAGE_BITS
        pages -= self._page_zero
        at = self._row_of.take(pages, mode="clip")
        at <<= PAGE_BITS
        at += signed & OFFSET
        return at

    def place_of(self, sequence: int) -> int:
        page = (sequence >> PAGE_BITS) - self._page_zero
        if 0 <= page < len(self._row_of):
            return self._rows[page] << PAGE_BITS | sequence & OFFSET
        return sequence & OFFSET

    def state_of(self, sequence: int) -> int:
        return self._states[self.place_of(sequence)]

    def states(self, sequences: Sequences) -> NDArray[np.uint8]:
        return self.state[self.places(sequences)]

    def open_range(self, first: int, count: int) -> Opened:
        """Make room for consecutive new messages: (positions in the pool, part of the range)."""
        opened: Opened = []
        done = 0
        while done < count:
            at = first + done
            here = min(count - done, PAGE - (at & OFFSET))
            row = self._own(at >> PAGE_BITS)
            start = row << PAGE_BITS | at & OFFSET
            opened.append((slice(start, start + here), slice(done, done + here)))
            self.living[row] += here
            done += here
        return opened

    def open_scattered(self, sequences: Sequences) -> Places:
        """`open_range` for messages in ascending order that do not follow each other."""
        pages, counts = np.unique(sequences >> np.uint64(PAGE_BITS), return_counts=True)
        self.reserve(len(pages))
        for page, count in zip(pages.tolist(), counts.tolist(), strict=True):
            row = self._own(page)  # may replace `living`
            self.living[row] += count
        return self.places(sequences)

    # --- states ---

    def enter(self, at: slice | Places, to: MessageState | NDArray[np.uint8]) -> None:
        """New messages take their first state, all the same or each its own."""
        before = self.state[at]
        if np.count_nonzero(before):
            raise Corruption("a message enters at a sequence that already is one")
        self.state[at] = to
        found = {to: len(before)} if isinstance(to, MessageState) else Counter(to.tolist())
        for state, count in found.items():
            if not ALLOWED[state][MessageState.NONE]:
                raise reject_transition(MessageState.NONE, MessageState(state))
            self.counts[state] += count

    def enter_one(self, sequence: int, *, key: int, time_ms: int, limit: int) -> None:
        """Make room for one new message, which is ready."""
        page = sequence >> PAGE_BITS
        row = self._rows[page - self._page_zero] if page == self._page_tail else self._own(page)
        at = row << PAGE_BITS | sequence & OFFSET
        if self._states[at]:
            raise Corruption("a message enters at a sequence that already is one")
        self._states[at] = MessageState.READY
        self.key[at], self.time_ms[at], self.limit[at] = key, time_ms, limit
        self.living[row] += 1
        self.counts[MessageState.READY] += 1

    def move_all(self, sequences: Sequences, to: MessageState) -> None:
        if len(sequences) == 1:
            self.move_one(self.place_of(int(sequences[0])), to)
        elif len(sequences):
            self.move(self.places(sequences), to)

    def move(self, at: Places, to: MessageState) -> None:
        """Take distinct messages to another state, or none of them if one may not go there."""
        if len(at) == 1:
            self.move_one(int(at[0]), to)
            return
        allowed, counts = ALLOWED[to], self.counts
        found = np.bincount(self.state[at], minlength=STATES).tolist()
        for start, count in enumerate(found):
            if count and not (start and allowed[start]):
                raise reject_transition(start, to)
        for start, count in enumerate(found):
            counts[start] -= count
        self.state[at] = to
        if to is MessageState.DONE:
            self._bury(at)
        else:
            counts[to] += len(at)

    def move_one(self, at: int, to: MessageState) -> None:
        start = self._states[at]
        if not (start and ALLOWED[to][start]):
            raise reject_transition(start, to)
        self.counts[start] -= 1
        self._states[at] = to
        if to is MessageState.DONE:
            row = at >> PAGE_BITS
            self.living[row] -= 1
            if not self.living[row]:
                self._close(self._page_by_row[row])
        else:
            self.counts[to] += 1

    def recount(self) -> None:
        """After a snapshot was written into the columns."""
        self.counts[:] = np.bincount(self.state, minlength=STATES).tolist()
        self.counts[MessageState.NONE] = self.counts[MessageState.DONE] = 0

    # --- scans ---

    def scan(self, wanted: frozenset[MessageState], *, after: int = 0) -> Iterator[Sequences]:
        """Sequences past `after` in one of the wanted states, ascending, in chunks."""
        lookup = mask_of(wanted)
        pages = self._pages()
        if after:
            pages = pages[pages >= after >> PAGE_BITS]
        for i in range(0, len(pages), SCAN_PAGES):
            some = pages[i : i + SCAN_PAGES]
            states = self.state.reshape(-1, PAGE)[self._row_of[some - self._page_zero]]
            which, offset = np.nonzero(lookup[states])
            found = (some[which] << PAGE_BITS | offset).view(np.uint64)
            if len(found) and int(found[0]) <= after:
                found = found[np.searchsorted(found, np.uint64(after), side="right") :]
            if len(found):
                yield found

    def all_in(
        self, wanted: frozenset[MessageState], *, after: int = 0, through: int | None = None
    ) -> Sequences:
        """Sequences past `after`, and up to `through`, in one of the wanted states, ascending."""
        chunks: list[Sequences] = []
        for found in self.scan(wanted, after=after):
            chunks.append(found)
            if through is not None and int(found[-1]) >= through:
                chunks[-1] = found[: found.searchsorted(np.uint64(through), side="right")]
                break
        return np.concatenate(chunks) if chunks else np.empty(0, np.uint64)

    # --- pages ---

    def _pages(self) -> NDArray[np.int64]:
        return np.flatnonzero(self._row_of) + self._page_zero

    def _own(self, page: int) -> int:
        """The row of a page that messages enter now; a new one if it had none."""
        index = page - self._page_zero
        if not 0 < index < len(self._row_of) - 1:
            self._reach(page)
            index = page - self._page_zero
        row = self._rows[index]
        if page != self._page_tail:
            left, self._page_tail = self._page_tail, page
            left_row = self._row_of[left - self._page_zero] if left >= 0 else 0
            if left_row and not self.living[left_row]:
                self._close(left)
        if not row:
            if not self._free:
                self._grow(max(ROWS_MIN, len(self.living) // 4))
            row = self._rows[index] = self._free.pop()
            self._page_by_row[row] = page
        return row

    def reserve(self, rows: int) -> None:
        if rows > len(self._free):
            self._grow(rows - len(self._free))

    def _grow(self, more: int) -> None:
        rows = len(self.living)
        for name, dtype in self.COLUMNS.items():
            grown: NDArray[Any] = np.zeros((rows + more) * PAGE, dtype)
            grown[: rows * PAGE] = getattr(self, name)
            setattr(self, name, grown)
        self.living = np.concatenate((self.living, np.zeros(more, np.int64)))
        self._free = [*range(rows + more - 1, rows - 1, -1), *self._free]
        self._page_by_row += [-1] * more
        self._refresh_views()

    def _reach(self, page: int) -> None:
        """Move the page map to where it covers `page` and every page that owns a row."""
        owned = self._pages()
        low = min(page, int(owned[0])) if len(owned) else page
        high = max(page, int(owned[-1])) if len(owned) else page
        rows = np.zeros(max(PAGES_MIN, 2 * (high - low + 1)) + 2, np.int64)
        rows[owned - low + 1] = self._row_of[owned - self._page_zero]
        self._row_of, self._page_zero = rows, low - 1
        self._refresh_views()

    def _refresh_views(self) -> None:
        # Single items are read and written through memoryviews: several times faster than numpy.
        self._states = self.state.data
        self._rows = self._row_of.data

    def _bury(self, at: Places) -> None:
        rows = at >> PAGE_BITS
        self.living -= np.bincount(rows, minlength=len(self.living))
        empty = rows[self.living[rows] == 0]
        if len(empty):
            for row in set(empty.tolist()):
                self._close(self._page_by_row[row])

    def _close(self, page: int) -> None:
        if page == self._page_tail:
            return
        row = int(self._row_of[page - self._page_zero])
        self._row_of[page - self._page_zero] = 0
        for name in self.COLUMNS:
            getattr(self, name)[row << PAGE_BITS : (row + 1) << PAGE_BITS] = 0
        self._free.append(row)

    # --- checks ---

    def validate(self) -> None:
        assert not self.state[:PAGE].any(), "row 0 holds a state"
        pages = self._pages()
        rows = self._row_of[pages - self._page_zero]
        assert len(np.unique(rows)) == len(rows), "two pages share a row"
        assert not set(rows.tolist()) & set(self._free), "an owned row is free"
        assert len(rows) + len(self._free) + 1 == len(self.living), "a row is lost"
        states = self.state.reshape(-1, PAGE)
        living = _ALIVE[states].sum(axis=1)
        assert (living == self.living).all(), "a row's count of living messages is off"
        counts = np.bincount(self.state, minlength=STATES)
        for state in ALIVE:
            assert counts[state] == self.counts[state], f"count of {state.name} is off"
        for page, row in zip(pages.tolist(), rows.tolist(), strict=True):
            assert self.living[row] or page == self._page_tail, "a dead page is kept"
        for row in self._free:
            for name in self.COLUMNS:
                assert not getattr(self, name)[row * PAGE : (row + 1) * PAGE].any()
