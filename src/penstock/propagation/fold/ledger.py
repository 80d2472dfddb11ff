"""What was released so far, and what waits for a cause.

**The ledger** has vectors, origins, chains and ids, each a numbered table.

A *chain* is what one origin wrote to one vector; its deltas are counted 1, 2, 3 … and released in
that order, so `seen` alone says which of them were. The last one's id is the chain's *head*. Most
vectors have one writer, so a vector names its first chain, and only the further ones are looked up
by their keys.

An id is in one of three states: released (its vector's number), PENDING, or VOID, which is as good
as unknown: its delta was quarantined, or lies ahead in the batch at hand. A released id counts as
known for `dedup_ms` of log time; ids past that are swept out now and then, which nobody notices.

**The waitlist** is the plain statement of the order, one delta at a time; `order` takes a short cut
for vectors of which every delta arrives in order, and must give the same.

A delta is *ready* when its own counter is the next of its chain, every other cause in its clock was
seen, and its parent was released as a delta of the same vector. One that arrives ready is released
at once; then, oldest arrival first, whatever that made ready, until nothing is. One that is not
ready waits for *one* missing cause, its key, and is looked at again when that is released: as
causes are counted without gaps, each waits at most once per cause. What is decided here is entered
into the ledger at once, through views of its columns.

A counter that was seen before under another id is refused ("counter reused").

When a delta has waited for `pending_ms` of log time, or `pending_max` wait, the eldest are turned
out. Whether a parent that is not known was released before the ids' time is for the log to say: if
nothing but the parent is missing it is asked for, and the fold pauses until it is answered. So what
follows never depends on when the answer came.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.model.delta import NO_ID
from penstock.model.delta_batch import DeltaBatch, sixteens
from penstock.propagation.fold.chains import Chains
from penstock.propagation.fold.table import (
    MEMORY,
    KeyTable,
    KeyView,
    Numbers,
    Space,
    VectorNames,
    views,
)

VOID: Final = 0
PENDING: Final = -1
ORIGINS_FEW: Final = 6
SWEEP_MIN: Final = 1 << 14  # ids below which sweeping is not worth it
SWEEP_SHARE: Final = 8  # of the ids, or of their time: looked at again after so much


# What a vector's byte of flags says: deltas of it wait; it is one of those at hand (which nobody
# finds set between two batches); something of it changed since the last snapshot.
WAITS: Final = 1
MARKED: Final = 2
CHANGED: Final = 4


class Ledger:
    """Everything that ordering knows of the past."""

    def __init__(self, dedup_ms: int, pending_ms: int, space: Space = MEMORY) -> None:
        self.dedup_ms, self.pending_ms = dedup_ms, pending_ms
        # `chain` is the vector's first chain plus one.
        self.vectors = KeyTable({"flags": np.uint8, "chain": np.int32}, space=space, name="vectors")
        self.waiting: dict[int, int] = {}  # by vector: how many of its deltas wait
        self.names = VectorNames(space=space)  # by vector
        self.origins = KeyTable({}, space=space, name="origins")
        self.codes: dict[bytes, int] = {}  # of origins, by name
        self._names: list[bytes] = []  # of origins
        self.ranks: Numbers = np.zeros(0, np.int64)  # of origins, by bytes
        self.chains = Chains(self.vectors.table, space)
        # `vector`: the vector's number plus one when released, else VOID or PENDING.
        self.ids = KeyTable({"vector": np.int32, "log_time_ms": np.int64}, space=space, name="ids")
        self.vectors_saved = 0  # the first so many are in a snapshot
        self.ids_saved = 0  # the first so many are in a snapshot, as they are but for …
        self.ids_changed: set[int] = set()  # … these of them
        self.time_ms = 0  # the latest log time looked at
        self._sweep_count = self._sweep_ms = 0  # ids are looked through at that count, or time

    @property
    def nbytes(self) -> int:
        parts = (self.vectors, self.names, self.origins, self.chains, self.ids)
        return sum(part.nbytes for part in parts)

    def vectors_of(self, batch: DeltaBatch) -> Numbers:
        """Numbers of the rows' vectors; new ones are entered with their names."""
        before = len(self.vectors)
        found = self.vectors.add(batch.vector[:, 0], batch.vector[:, 1])
        fresh = len(self.vectors) - before
        if fresh:
            row = np.empty(fresh, np.int64)
            new = np.flatnonzero(found >= before)
            row[found[new] - before] = new
            namespaces, vector_ids = zip(*batch.take(row).names(), strict=True)
            self.names.extend(namespaces, vector_ids)
        return found

    def origins_of(self, origins: NDArray[np.uint64]) -> Numbers:
        low, high = np.ascontiguousarray(origins[:, 0]), np.ascontiguousarray(origins[:, 1])
        before = len(self.origins)
        found = np.empty(len(low), np.int64)
        rest = np.arange(len(low))
        # A batch has few origins: comparing with each is quicker than looking every row up.
        for _ in range(ORIGINS_FEW):
            if not len(rest):
                break
            one = rest[:1]
            same = (low[rest] == low[one]) & (high[rest] == high[one])
            found[rest[same]] = self.origins.add(low[one], high[one])[0]
            rest = rest[~same]
        found[rest] = self.origins.add(low[rest], high[rest])
        if len(self.origins) > before:
            self.rank_origins()
        return found

    def rank_origins(self) -> None:
        """Codes are given in order of sight; ties of time are settled by the origins' bytes."""
        names = self._names = self.origin_names()
        self.codes = {name: code for code, name in enumerate(names)}
        self.ranks = np.empty(len(names), np.int64)
        self.ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))

    def origin_names(self) -> list[bytes]:
        table = self.origins.table
        return sixteens(np.stack([table.rows("low"), table.rows("high")], axis=1))

    def origin_name(self, code: int) -> bytes:
        return self._names[code]

    def heads_of(self, vector: int) -> list[int]:
        """A vector's chains."""
        return self.chains.list_of(vector)

    def facts(self) -> dict[str, Any]:
        """What is not in columns."""
        return {
            "time_ms": self.time_ms,
            "sweep": [self._sweep_count, self._sweep_ms],
            "saved": [self.vectors_saved, self.ids_saved],
            "ids_changed": sorted(self.ids_changed),
        }

    def resume(self, facts: dict[str, Any]) -> None:
        self.time_ms = facts["time_ms"]
        self._sweep_count, self._sweep_ms = facts["sweep"]
        self.vectors_saved, self.ids_saved = facts["saved"]
        self.ids_changed = set(facts["ids_changed"])

    def on_saved(self) -> None:
        self.vectors.table.rows("flags")[:] &= ~np.uint8(CHANGED)
        self.vectors_saved, self.ids_saved = len(self.vectors), len(self.ids)
        self.ids_changed.clear()

    def note_ids(self, entries: Numbers) -> None:
        """Ids that a snapshot has are not any more what they were."""
        if self.ids_saved:
            self.ids_changed.update(entries[entries < self.ids_saved].tolist())

    def known(self, entries: Numbers, log_times_ms: Numbers) -> NDArray[np.bool_]:
        """Which entries (of `ids`; -1: none) were released and count as known at these times."""
        table = self.ids.table
        recent = table["log_time_ms"][entries] >= log_times_ms - self.dedup_ms
        known: NDArray[np.bool_] = (entries >= 0) & (table["vector"][entries] > 0) & recent
        return known

    def sweep(self) -> bool:
        """Forget ids that are past their time, once they are half of all; says whether it did.

        Looking takes time for every id there is, so it waits until a good part of them is new, or
        may have come of age.
        """
        if len(self.ids) < self._sweep_count and self.time_ms < self._sweep_ms:
            return False
        kept = np.flatnonzero(self.remembered())
        due = 2 * len(kept) <= len(self.ids)
        if due:
            self._keep_ids(kept)
        self._sweep_count = len(self.ids) + len(self.ids) // SWEEP_SHARE
        self._sweep_ms = self.time_ms + (self.dedup_ms + self.pending_ms) // SWEEP_SHARE
        return due

    def _keep_ids(self, kept: Numbers) -> None:
        changed = np.isin(kept, np.array(sorted(self.ids_changed), np.int64))
        self.ids_changed = set(np.flatnonzero(changed).tolist())
        self.ids_saved = int(np.searchsorted(kept, self.ids_saved))
        self.ids.keep(kept)

    def remembered(self) -> NDArray[np.bool_]:
        """Ids that may matter again: known to what comes, or to what waits since earlier."""
        table = self.ids.table
        states = table.rows("vector")
        recent = table.rows("log_time_ms") >= self.time_ms - self.dedup_ms - self.pending_ms
        remembered: NDArray[np.bool_] = ((states > 0) & recent) | (states == PENDING)
        return remembered

    def validate(self) -> None:
        for keys in (self.vectors, self.origins, self.chains, self.ids):
            keys.validate()
        assert len(self.names) == len(self.names.vector_ids) == len(self.vectors)
        flags = self.vectors.table.rows("flags")
        assert not (flags & MARKED).any(), "a mark was left behind"
        assert set(np.flatnonzero(flags & WAITS).tolist()) == self.waiting.keys()
        assert self.ids_saved <= len(self.ids)


REUSED: Final = "counter reused"
PARENT_MISSING: Final = "parent missing"
PARENT_ELSEWHERE: Final = "parent of another vector"
CAUSE_MISSING: Final = "cause missing"
LATE: Final = "late"
INVALID: Final = "invalid"
TURNED_OUT_SHARE: Final = 8  # of the pending that leave together when there are too many
_HALVES: Final = struct.Struct("<QQ")  # an id as the ledger's tables hold it

Key = tuple[int, int] | tuple[int, bytes]  # (chain, counter), or (vector, parent)


class WaitingDelta:
    __slots__ = (
        "chain", "counter", "done", "entry", "headers", "id", "key", "log_time_ms", "others",
        "parent", "payload", "row", "sequence", "vector",
    )  # fmt: skip

    def __init__(
        self, row: int, entry: int, sequence: int, log_time_ms: int, id_: bytes,
        parent: bytes | None, vector: int, chain: int, counter: int,
        others: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.row = row  # in the batch at hand, or -1
        self.entry = entry  # of its id in the ledger, as long as that batch is at hand
        self.sequence = sequence
        self.log_time_ms = log_time_ms
        self.id = id_
        self.parent = parent  # None: there is none, or it is known
        self.vector = vector
        self.chain = chain
        self.counter = counter
        self.others = others
        self.payload = b""  # kept from when it starts to wait
        self.headers = b""
        self.key: Key | None = None  # what it waits for
        self.done = False

    @property
    def was_kept(self) -> bool:
        """Whether it waited through the end of an earlier batch."""
        return self.row < 0

    def __lt__(self, other: WaitingDelta) -> bool:
        return self.sequence < other.sequence


class Refusal(NamedTuple):
    waiting: WaitingDelta
    reason: str
    missing: bytes  # the parent that is not known, or zeros
    at: int  # the row whose arrival made it so


@dataclass(slots=True)
class Verdicts:
    released: list[WaitingDelta] = field(default_factory=list)
    at: list[int] = field(default_factory=list)  # the row whose arrival released each
    refused: list[Refusal] = field(default_factory=list)
    duplicates: int = 0


class Waitlist:
    def __init__(self, ledger: Ledger, *, pending_max: int, pending_ms: int) -> None:
        self.ledger = ledger
        self.pending_max, self.pending_ms = pending_max, pending_ms
        self.by_id: dict[bytes, WaitingDelta] = {}
        self.by_key: dict[Key, list[WaitingDelta]] = {}
        self.arrivals: deque[WaitingDelta] = deque()  # ascending by sequence; done ones linger
        self.asked: list[WaitingDelta] = []  # turned out, but for the answer about their parents

    def __len__(self) -> int:
        return len(self.by_id)

    def look(self) -> None:
        """Take views of where the ledger's tables lie; rows may have been added since the last."""
        ledger = self.ledger
        self._ids = KeyView(ledger.ids)
        self._states, self._times = views(ledger.ids.table, "vector", "log_time_ms")
        self._seen, self._heads = views(ledger.chains.table, "seen", "head")
        (self._flags,) = views(ledger.vectors.table, "flags")

    # --- arrivals ---

    def take(self, arrivals: list[WaitingDelta], times_ms: Numbers) -> tuple[Verdicts, int]:
        """Decide on deltas in the order of their arrival.

        `times_ms` are the log times of all rows of the batch: the stretch ends, at the row
        returned, when a delta has waited too long or too many wait.
        """
        self.look()
        verdicts = Verdicts()
        limit = 0  # nothing is overdue below this row
        for waiting in arrivals:
            row = waiting.row
            if row >= limit:
                limit = self._safe_until(row, times_ms)
                if row >= limit:
                    return verdicts, limit
            if self._has_to_wait(waiting, verdicts) and len(self.by_id) > self.pending_max:
                return verdicts, row + 1
        eldest = self.eldest()
        return verdicts, len(times_ms) if eldest is None else self._overdue(eldest, times_ms)

    def _has_to_wait(self, waiting: WaitingDelta, verdicts: Verdicts) -> bool:
        state, oldest_ms = self._states[waiting.entry], waiting.log_time_ms - self.ledger.dedup_ms
        if state == PENDING or (state > 0 and self._times[waiting.entry] >= oldest_ms):
            verdicts.duplicates += 1
            return False
        unmet = self._unmet(waiting)
        if unmet is None:
            self._release(waiting, verdicts, waiting.row)
        elif unmet is REUSED:
            self._refuse(waiting, verdicts, REUSED, at=waiting.row)
        else:
            self.wait(waiting, unmet)  # type: ignore[arg-type]
            return True
        return False

    def _safe_until(self, row: int, times_ms: Numbers) -> int:
        """The row at which the eldest has waited too long, or would one that came at `row`."""
        eldest = self.eldest()
        if eldest is None:
            return int(times_ms.searchsorted(times_ms[row] + self.pending_ms))
        return self._overdue(eldest, times_ms)

    def _overdue(self, waiting: WaitingDelta, times_ms: Numbers) -> int:
        return int(times_ms.searchsorted(waiting.log_time_ms + self.pending_ms))

    def eldest(self) -> WaitingDelta | None:
        while self.arrivals and self.arrivals[0].done:
            self.arrivals.popleft()
        return self.arrivals[0] if self.arrivals else None

    def wait(self, waiting: WaitingDelta, key: Key) -> None:
        """Let it wait for a cause, for the first time or for a next one."""
        if waiting.key is None:
            self.by_id[waiting.id] = waiting
            self.arrivals.append(waiting)
            count = self.ledger.waiting[waiting.vector] = (
                self.ledger.waiting.get(waiting.vector, 0) + 1
            )
            if count == 1:
                self._flags[waiting.vector] |= WAITS
            self._mark(waiting, PENDING)
        waiting.key = key
        self.by_key.setdefault(key, []).append(waiting)

    def _mark(self, waiting: WaitingDelta, state: int) -> None:
        entry = waiting.entry
        if waiting.was_kept:
            entry = self._ids.find(*_HALVES.unpack(waiting.id))
        self._states[entry], self._times[entry] = state, waiting.log_time_ms
        if entry < self.ledger.ids_saved:
            self.ledger.ids_changed.add(entry)

    def keep(self, batch: DeltaBatch) -> None:
        """Copy the bytes of what began to wait in this batch, which is through."""
        for waiting in reversed(self.arrivals):
            if waiting.was_kept:
                break
            if waiting.done:
                continue
            waiting.payload = batch.payload(waiting.row)
            if batch.headers is not None:
                waiting.headers = batch.headers[waiting.row]
            waiting.row = -1

    # --- readiness ---

    def _unmet(self, waiting: WaitingDelta) -> Key | str | None:
        """The first cause that is missing, clock before parent; REUSED; None if it is ready."""
        seen = self._seen
        chain, counter = waiting.chain, waiting.counter
        own = seen[chain]
        if counter != own + 1:
            return REUSED if counter <= own else (chain, counter - 1)
        for chain, counter in waiting.others:
            if seen[chain] < counter:
                return chain, counter
        if waiting.parent is None or self._parent_released(waiting):
            return None
        return waiting.vector, waiting.parent

    def _parent_released(self, waiting: WaitingDelta) -> bool:
        heads, halves = self._heads, _HALVES.unpack(waiting.parent)  # type: ignore[arg-type]
        own = 2 * waiting.chain  # mostly the parent is what its own origin wrote last
        if (heads[own], heads[own + 1]) == halves or self._parent_vector(waiting) == waiting.vector:
            return True
        chains = self.ledger.heads_of(waiting.vector)
        return any((heads[2 * chain], heads[2 * chain + 1]) == halves for chain in chains)

    def _parent_vector(self, waiting: WaitingDelta) -> int:
        """The vector of which the parent was released; -1: that is not known."""
        entry = self._ids.find(*_HALVES.unpack(waiting.parent))  # type: ignore[arg-type]
        oldest_ms = waiting.log_time_ms - self.ledger.dedup_ms
        if entry < 0 or self._states[entry] <= 0 or self._times[entry] < oldest_ms:
            return -1
        vector: int = self._states[entry] - 1
        return vector

    # --- releases ---

    def _release(self, waiting: WaitingDelta, verdicts: Verdicts, at: int) -> None:
        """Release a delta, and then what that makes ready."""
        ready: list[WaitingDelta] = []
        self._let_go(waiting, verdicts, at, ready)
        while ready:
            following = heappop(ready)
            unmet = self._unmet(following)
            if unmet is None:
                self._let_go(following, verdicts, at, ready)
            elif unmet is REUSED:
                self._refuse(following, verdicts, REUSED, at=at)
            else:
                self.wait(following, unmet)  # type: ignore[arg-type]

    def _let_go(
        self, waiting: WaitingDelta, verdicts: Verdicts, at: int, ready: list[WaitingDelta]
    ) -> None:
        chain, counter, id_ = waiting.chain, waiting.counter, waiting.id
        if waiting.key is not None:
            self._remove(waiting)
        self._seen[chain] = counter
        self._heads[2 * chain], self._heads[2 * chain + 1] = _HALVES.unpack(id_)
        self._mark(waiting, waiting.vector + 1)
        verdicts.released.append(waiting)
        verdicts.at.append(at)
        if self.by_key:
            for woken in self.by_key.pop((chain, counter), ()):
                heappush(ready, woken)
            for woken in self.by_key.pop((waiting.vector, id_), ()):
                heappush(ready, woken)

    def _refuse(
        self, waiting: WaitingDelta, verdicts: Verdicts, reason: str, *,
        missing: bytes = NO_ID, at: int = 0,
    ) -> None:  # fmt: skip
        if waiting.key is not None:
            self._remove(waiting)
        self._mark(waiting, VOID)
        verdicts.refused.append(Refusal(waiting, reason, missing, at))

    def _remove(self, waiting: WaitingDelta) -> None:
        del self.by_id[waiting.id]
        waiting.done = True
        left = self.ledger.waiting[waiting.vector] - 1
        if left:
            self.ledger.waiting[waiting.vector] = left
        else:
            del self.ledger.waiting[waiting.vector]
            self._flags[waiting.vector] &= ~WAITS

    # --- those that waited too long ---

    def turn_out(self, now_ms: int) -> Verdicts:
        """Refuse the deltas that are overdue at `now_ms`, or the eldest of too many. Those of which
        only the parent is missing are kept in `asked`; `answer` decides on them."""
        self.look()
        verdicts, spare = Verdicts(), 0
        if len(self.by_id) > self.pending_max:
            spare = max(1, len(self.by_id) // TURNED_OUT_SHARE)
        for waiting in list(self.arrivals):
            overdue = waiting.log_time_ms + self.pending_ms <= now_ms
            if not overdue and spare <= 0:
                break
            if waiting.done:
                continue
            spare -= 1
            self._turn_out(waiting, verdicts)
        return verdicts

    def _turn_out(self, waiting: WaitingDelta, verdicts: Verdicts) -> None:
        key, parent = waiting.key, waiting.parent
        assert key is not None
        if key[1] != parent:
            lacks_parent = parent is not None and not self._parent_released(waiting)
            reason, missing = CAUSE_MISSING, parent if lacks_parent and parent else NO_ID
        elif self._parent_vector(waiting) >= 0:
            reason, missing = PARENT_ELSEWHERE, parent
        else:
            self.asked.append(waiting)
            return
        self._forget_key(waiting)
        self._refuse(waiting, verdicts, reason, missing=missing)

    def _forget_key(self, waiting: WaitingDelta) -> None:
        key = waiting.key
        assert key is not None
        others = self.by_key[key]
        others.remove(waiting)
        if not others:
            del self.by_key[key]

    def answer(self, found: set[bytes]) -> Verdicts:
        """Release those whose parents the log has, refuse the others."""
        self.look()
        verdicts = Verdicts()
        asked, self.asked = self.asked, []
        for waiting in asked:
            if waiting.done:
                continue  # released by one before it
            parent = waiting.parent
            assert parent is not None
            self._forget_key(waiting)
            if parent not in found:
                self._refuse(waiting, verdicts, PARENT_MISSING, missing=parent)
                continue
            waiting.parent = None
            # Its clock was met when it was turned out, and still is unless its counter was reused.
            if self._unmet(waiting) is None:
                self._release(waiting, verdicts, 0)
            else:
                self._refuse(waiting, verdicts, REUSED)
        return verdicts

    def validate(self) -> None:
        assert len(self.by_id) <= self.pending_max + 1
        waiting = [w for w in self.arrivals if not w.done]
        assert [w.sequence for w in waiting] == sorted(w.sequence for w in waiting)
        assert set(self.by_id) == {w.id for w in waiting}
        keyed = [w for some in self.by_key.values() for w in some]
        assert {id(w) for w in keyed} == {id(w) for w in waiting}
        assert all(w.key == key for key, some in self.by_key.items() for w in some)
        assert all(w.was_kept for w in waiting), "a batch was not kept"
