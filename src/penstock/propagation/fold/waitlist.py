"""Deltas that wait for a cause, and the order in which they are released.

This is the plain statement of the order, one delta at a time; `order` takes a short cut for
vectors of which every delta arrives in order, and must give the same.

A delta is *ready* when its own counter is the next of its chain, every other cause in its clock was
seen, and its parent was released as a delta of the same vector. One that arrives ready is released
at once; then, oldest arrival first, whatever that made ready, until nothing is. One that is not
ready waits for *one* missing cause, its key, and is looked at again when that is released: as
causes are counted without gaps, each waits at most once per cause.

A counter that was seen before under another id is refused ("counter reused").

When a delta has waited for `pending_ms` of log time, or `pending_max` wait, the eldest are turned
out. Whether a parent that is not known was released before the ids' time is for the log to say: if
nothing but the parent is missing it is asked for, and the fold pauses until it is answered. So what
follows never depends on when the answer came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np

from penstock.model.delta import NO_ID
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.ledger import PENDING, VOID, Ledger
from penstock.propagation.fold.table import Numbers, Words

REUSED: Final = "counter reused"
PARENT_MISSING: Final = "parent missing"
PARENT_ELSEWHERE: Final = "parent of another vector"
CAUSE_MISSING: Final = "cause missing"
LATE: Final = "late"
INVALID: Final = "invalid"
TURNED_OUT_SHARE: Final = 8  # of the pending that leave together when there are too many

Key = tuple[int, int] | tuple[int, bytes]  # (chain, counter), or (vector, parent)


class WaitingDelta:
    """One delta, while its order is being decided."""

    __slots__ = (
        "chain", "counter", "done", "headers", "id", "key", "log_time_ms", "others", "parent",
        "payload", "row", "sequence", "vector",
    )  # fmt: skip

    def __init__(
        self, row: int, sequence: int, log_time_ms: int, id_: bytes, parent: bytes | None,
        vector: int, chain: int, counter: int, others: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.row = row  # in the batch at hand, or -1
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
    """What became of deltas in one stretch of the log."""

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
        # What the batch at hand has changed, written to the ledger when it is through:
        self.seen: dict[int, int] = {}
        self.heads: dict[int, bytes] = {}
        self.released: dict[bytes, WaitingDelta] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    # --- arrivals ---

    def take(
        self, arrivals: list[WaitingDelta], known: list[bool], times_ms: Numbers
    ) -> tuple[Verdicts, int]:
        """Decide on deltas in the order of their arrival.

        `known` says which ids the ledger had released before. `times_ms` are the log times of all
        rows of the batch: the stretch ends, at the row returned, when a delta has waited too long
        or too many wait.
        """
        verdicts = Verdicts()
        limit = 0  # nothing is overdue below this row
        for waiting, is_known in zip(arrivals, known, strict=True):
            row = waiting.row
            if row >= limit:
                limit = self._safe_until(row, times_ms)
                if row >= limit:
                    return verdicts, limit
            again = self._recent(self.released.get(waiting.id), waiting)
            if is_known or waiting.id in self.by_id or again:
                verdicts.duplicates += 1
                continue
            unmet = self._unmet(waiting)
            if unmet is None:
                self._release(waiting, verdicts, row)
            elif unmet is REUSED:
                verdicts.refused.append(Refusal(waiting, REUSED, NO_ID, row))
            else:
                self.wait(waiting, unmet)  # type: ignore[arg-type]
                if len(self.by_id) > self.pending_max:
                    return verdicts, row + 1
        eldest = self.eldest()
        return verdicts, len(times_ms) if eldest is None else self._overdue(eldest, times_ms)

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

    def _recent(self, first: WaitingDelta | None, then: WaitingDelta) -> bool:
        """Whether it was released in this batch, and is still known."""
        dedup_ms = self.ledger.dedup_ms
        return first is not None and first.log_time_ms >= then.log_time_ms - dedup_ms

    def wait(self, waiting: WaitingDelta, key: Key) -> None:
        """Let it wait for a cause, for the first time or for a next one."""
        if waiting.key is None:
            self.by_id[waiting.id] = waiting
            self.arrivals.append(waiting)
        waiting.key = key
        self.by_key.setdefault(key, []).append(waiting)

    # --- readiness ---

    def _unmet(self, waiting: WaitingDelta) -> Key | str | None:
        """The first cause that is missing, clock before parent; REUSED; None if it is ready."""
        seen = self.seen
        chain, counter = waiting.chain, waiting.counter
        own = seen[chain] if chain in seen else self._seen(chain)
        if counter != own + 1:
            return REUSED if counter <= own else (chain, counter - 1)
        for chain, counter in waiting.others:
            if (seen[chain] if chain in seen else self._seen(chain)) < counter:
                return chain, counter
        if waiting.parent is None or self._parent_released(waiting):
            return None
        return waiting.vector, waiting.parent

    def _seen(self, chain: int) -> int:
        seen = self.seen[chain] = int(self.ledger.chains.table["seen"][chain])
        return seen

    def _parent_released(self, waiting: WaitingDelta) -> bool:
        parent = waiting.parent
        assert parent is not None
        first = self.released.get(parent)
        if first is not None and first.vector == waiting.vector and self._recent(first, waiting):
            return True
        entry = self._find(parent)
        if self.ledger.known(entry, np.array([waiting.log_time_ms]))[0]:
            vector = int(self.ledger.ids.table["vector"][entry[0]]) - 1
            if vector == waiting.vector:
                return True
        return any(self._head(chain) == parent for chain in self.ledger.heads_of(waiting.vector))

    def _find(self, id_: bytes) -> Numbers:
        low, high = np.frombuffer(id_, "<u8")
        return self.ledger.ids.find(np.array([low]), np.array([high]))

    def _head(self, chain: int) -> bytes:
        head = self.heads.get(chain)
        return self.ledger.chains.table["head"][chain].tobytes() if head is None else head

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
                self._remove(following)
                verdicts.refused.append(Refusal(following, REUSED, NO_ID, at))
            else:
                self.wait(following, unmet)  # type: ignore[arg-type]

    def _let_go(
        self, waiting: WaitingDelta, verdicts: Verdicts, at: int, ready: list[WaitingDelta]
    ) -> None:
        chain, counter, id_ = waiting.chain, waiting.counter, waiting.id
        if waiting.key is not None:
            self._remove(waiting)
        self.seen[chain] = counter
        self.heads[chain] = id_
        self.released[id_] = waiting
        verdicts.released.append(waiting)
        verdicts.at.append(at)
        if self.by_key:
            for woken in self.by_key.pop((chain, counter), ()):
                heappush(ready, woken)
            for woken in self.by_key.pop((waiting.vector, id_), ()):
                heappush(ready, woken)

    def _remove(self, waiting: WaitingDelta) -> None:
        del self.by_id[waiting.id]
        waiting.done = True

    # --- those that waited too long ---

    def turn_out(self, now_ms: int) -> Verdicts:
        """Refuse the deltas that are overdue at `now_ms`, or the eldest of too many.

        Those of which only the parent is missing are kept in `asked`; `answer` decides on them.
        """
        verdicts = Verdicts()
        spare = 0
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
            missing = parent if lacks_parent and parent else NO_ID
            self._refuse(waiting, verdicts, CAUSE_MISSING, missing)
            return
        assert parent is not None
        if self.ledger.known(self._find(parent), np.array([waiting.log_time_ms]))[0]:
            self._refuse(waiting, verdicts, PARENT_ELSEWHERE, parent)
        else:
            self.asked.append(waiting)

    def _refuse(
        self, waiting: WaitingDelta, verdicts: Verdicts, reason: str, missing: bytes
    ) -> None:
        self._forget_key(waiting)
        self._remove(waiting)
        verdicts.refused.append(Refusal(waiting, reason, missing, 0))

    def _forget_key(self, waiting: WaitingDelta) -> None:
        key = waiting.key
        assert key is not None
        others = self.by_key[key]
        others.remove(waiting)
        if not others:
            del self.by_key[key]

    def answer(self, found: set[bytes]) -> Verdicts:
        """Release those whose parents the log has, refuse the others."""
        verdicts = Verdicts()
        asked, self.asked = self.asked, []
        for waiting in asked:
            if waiting.done:
                continue  # released by one before it
            parent = waiting.parent
            assert parent is not None
            if parent in found:
                self._forget_key(waiting)
                waiting.parent = None
                self._again(waiting, verdicts)
            else:
                self._refuse(waiting, verdicts, PARENT_MISSING, parent)
        return verdicts

    def _again(self, waiting: WaitingDelta, verdicts: Verdicts) -> None:
        """An asked delta's clock was met when it was turned out, and still is unless reused."""
        if self._unmet(waiting) is None:
            self._release(waiting, verdicts, 0)
        else:
            self._remove(waiting)
            verdicts.refused.append(Refusal(waiting, REUSED, NO_ID, 0))

    # --- what the ledger learns ---

    def write_back(self, verdicts: Verdicts, batch: DeltaBatch) -> None:
        """Enter into the ledger what was decided one by one, and keep what waits on."""
        started = self._keep_payloads(batch)
        if started or verdicts.released or verdicts.refused or self.heads:
            self._enter_chains()
            refused = [refusal.waiting for refusal in verdicts.refused]
            self._mark(refused, np.full(len(refused), VOID))
            self._mark(started, np.full(len(started), PENDING))
            released = verdicts.released
            self._mark(released, np.array([w.vector + 1 for w in released], np.int64))
            waiting = self.ledger.vectors.table["waiting"]
            np.add.at(waiting, [w.vector for w in started], 1)
            np.subtract.at(waiting, [w.vector for w in released + refused if w.was_kept], 1)
        self.seen.clear()
        self.heads.clear()
        self.released.clear()

    def _keep_payloads(self, batch: DeltaBatch) -> list[WaitingDelta]:
        """Deltas that began to wait in this batch, with their bytes."""
        started = []
        for waiting in reversed(self.arrivals):
            if waiting.was_kept:
                break
            if waiting.done:
                continue
            waiting.payload = batch.payload(waiting.row)
            if batch.headers is not None:
                waiting.headers = batch.headers[waiting.row]
            waiting.row = -1
            started.append(waiting)
        return started

    def _enter_chains(self) -> None:
        table, chains = self.ledger.chains.table, list(self.heads)
        if chains:
            table["seen"][chains] = [self.seen[chain] for chain in chains]
            table["head"][chains] = _pairs(list(self.heads.values()))

    def _mark(self, some: list[WaitingDelta], states: Numbers) -> None:
        if some:
            ids, table = _pairs([w.id for w in some]), self.ledger.ids.table
            entries = self.ledger.ids.add(ids[:, 0], ids[:, 1])
            table["vector"][entries] = states
            table["log_time_ms"][entries] = [w.log_time_ms for w in some]

    def validate(self) -> None:
        assert len(self.by_id) <= self.pending_max + 1
        waiting = [w for w in self.arrivals if not w.done]
        assert [w.sequence for w in waiting] == sorted(w.sequence for w in waiting)
        assert set(self.by_id) == {w.id for w in waiting}
        keyed = [w for some in self.by_key.values() for w in some]
        assert {id(w) for w in keyed} == {id(w) for w in waiting}
        assert all(w.key == key for key, some in self.by_key.items() for w in some)
        assert not self.seen, "a batch was not written back"


def _pairs(ids: list[bytes]) -> Words:
    return np.frombuffer(b"".join(ids), "<u8").reshape(-1, 2)
