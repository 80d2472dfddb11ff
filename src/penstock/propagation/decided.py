"""From single deltas back to columns: what was released or refused, and what the ledger learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary
from penstock.model.deltas import DeltaBatch
from penstock.propagation.chains import PENDING, VOID, Ledger
from penstock.propagation.pending import Decided, Pending, Waiting
from penstock.propagation.table import Numbers

Sequences = NDArray[np.uint64]


@dataclass(slots=True)
class Released:
    """Released deltas in order, with the numbers of their vectors and chains."""

    batch: DeltaBatch
    positions: Sequences  # the sequence whose arrival released each
    vectors: Numbers
    chains: Numbers

    def take(self, rows: NDArray[np.bool_]) -> Released:
        return Released(
            self.batch.take(rows), self.positions[rows], self.vectors[rows], self.chains[rows]
        )


@dataclass(slots=True)
class Refused:
    """Deltas that can not be released, ascending by position."""

    batch: DeltaBatch
    positions: Sequences
    reasons: list[str]
    missing: list[bytes]

    @staticmethod
    def join(parts: Sequence[Refused]) -> Refused:
        """All of them in the order of their positions."""
        full = [part for part in parts if part.reasons]
        if len(full) <= 1:
            return full[0] if full else NOTHING
        positions = np.concatenate([np.empty(0, np.uint64), *(part.positions for part in full)])
        order = np.argsort(positions, kind="stable")
        reasons = [reason for part in full for reason in part.reasons]
        missing = [id_ for part in full for id_ in part.missing]
        return Refused(
            DeltaBatch.concat([part.batch for part in full]).take(order),
            positions[order],
            [reasons[i] for i in order],
            [missing[i] for i in order],
        )


NOTHING: Final = Refused(DeltaBatch.empty(), np.empty(0, np.uint64), [], [])


def released_of(batch: DeltaBatch, decided: Decided, position: int | None = None) -> Released:
    """Positions are those of the rows that released them, or the one given."""
    chosen = decided.released
    at = np.array(decided.at, np.int64)
    return Released(
        _collected(batch, chosen),
        batch.sequences[at] if position is None else _filled(len(chosen), position),
        np.array([w.vector for w in chosen], np.int64),
        np.array([w.chain for w in chosen], np.int64),
    )


def refused_of(batch: DeltaBatch, decided: Decided, position: int | None = None) -> Refused:
    refused = decided.refused
    if not refused:
        return NOTHING
    at = np.array([refusal.at for refusal in refused], np.int64)
    return Refused(
        _collected(batch, [refusal.waiting for refusal in refused]),
        batch.sequences[at] if position is None else _filled(len(refused), position),
        [refusal.reason for refusal in refused],
        [refusal.missing for refusal in refused],
    )


def _filled(count: int, value: int) -> Sequences:
    return np.full(count, value, np.uint64)


def _collected(batch: DeltaBatch, some: list[Waiting]) -> DeltaBatch:
    """The deltas in the order given: rows of the batch, or kept from earlier ones."""
    base, rows = with_kept(batch, some)
    return base.take(rows)


def with_kept(batch: DeltaBatch, some: list[Waiting]) -> tuple[DeltaBatch, Numbers]:
    """The batch, followed by what was kept from earlier ones, and where each delta is in that."""
    rows = np.array([w.row for w in some], np.int64)
    before = rows < 0
    if not before.any():
        return batch, rows
    kept = [w for w in some if w.row < 0]
    rows[before] = len(batch) + np.arange(len(kept))
    headers = Binary.of([w.headers for w in kept]) if any(w.headers for w in kept) else None
    earlier = DeltaBatch.of(
        [w.payload for w in kept],
        sequences=np.array([w.sequence for w in kept], np.uint64),
        log_times_ms=np.array([w.log_time_ms for w in kept], np.int64),
        headers=headers,
    )
    return DeltaBatch.concat([batch, earlier]), rows


def write_back(ledger: Ledger, pending: Pending, decided: Decided, batch: DeltaBatch) -> None:
    """Enter into the ledger what was decided one by one, and keep what waits on."""
    started = _keep_payloads(pending, batch)
    if not (started or decided.released or decided.refused or pending.heads):
        pending.seen.clear()
        return
    table = ledger.chains.table
    chains = list(pending.heads)
    if chains:
        table["seen"][chains] = [pending.seen[chain] for chain in chains]
        table["head"][chains] = _pairs(list(pending.heads.values()))
    refused = [refusal.waiting for refusal in decided.refused]
    _mark(ledger, refused, np.full(len(refused), VOID))
    _mark(ledger, started, np.full(len(started), PENDING))
    _mark(ledger, decided.released, np.array([w.vector + 1 for w in decided.released], np.int64))
    waiting = ledger.vectors.table["waiting"]
    np.add.at(waiting, [w.vector for w in started], 1)
    np.subtract.at(waiting, [w.vector for w in decided.released + refused if w.was_kept], 1)
    pending.seen.clear()
    pending.heads.clear()
    pending.released.clear()


def _keep_payloads(pending: Pending, batch: DeltaBatch) -> list[Waiting]:
    """Deltas that began to wait in this batch, with their bytes."""
    started = []
    for waiting in reversed(pending.arrivals):
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


def _mark(ledger: Ledger, some: list[Waiting], states: Numbers) -> None:
    if some:
        ids = _pairs([w.id for w in some])
        entries = ledger.ids.add(ids[:, 0], ids[:, 1])
        ledger.ids.table["vector"][entries] = states
        ledger.ids.table["log_time_ms"][entries] = [w.log_time_ms for w in some]


def _pairs(ids: list[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(ids), "<u8").reshape(-1, 2)
