"""Several changes of one vector within a time window as one: for subscribers who ask for it.

A *run* is a stretch of SPARSE and DENSE deltas of one vector by one origin, with rising times and
no other delta of the vector between them. A run becomes one delta: later components win, and DENSE
makes it DENSE. It has the id, the clock, the time and the headers of the last, the parent of the
first (the last one's own parent is never seen), and the most urgent class. All else is passed on.

Who applies deltas in the order in which they come ends up with what all of them would have given.
The components of a run are stamped with the time of its last delta. For who compares stamps that
makes a difference only where another origin has changed the vector within the same window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from penstock.errors import InvalidArgument
from penstock.model.columns import Binary
from penstock.model.delta import (
    CLOCK,
    HAS_INDICES,
    HAS_METADATA,
    HAS_PARENT,
    HEADER,
    PAYLOAD_BYTES_MAX,
    Op,
)
from penstock.model.delta_batch import FIXED, DeltaBatch, gather, halves
from penstock.propagation.flow.outbox import bytes_of
from penstock.propagation.fold.releases import Merged, ReleasedRows
from penstock.propagation.fold.table import Numbers

ENTRIES_MAX: Final = 10_000


class CoalesceWindow:
    """It opens with the first rows and is due `ms` later, or when so much waits."""

    __slots__ = ("_bytes", "_opened_ms", "_parts", "bytes_max", "entries", "entries_max", "ms")

    def __init__(
        self, ms: float, *, entries_max: int = ENTRIES_MAX, bytes_max: int = 8 << 20
    ) -> None:
        if not ms > 0 or entries_max < 1:
            raise InvalidArgument("a window has a length and room", field="coalesce_ms", limit=1)
        self.ms, self.entries_max, self.bytes_max = ms, entries_max, bytes_max
        self._opened_ms = 0.0
        self.clear()

    def add(self, rows: ReleasedRows, now_ms: float) -> None:
        """Let rows wait for the end of the window."""
        if not len(rows):
            return
        if not self._parts:
            self._opened_ms = now_ms
        self._parts.append(rows)
        self.entries += len(rows)
        self._bytes += bytes_of(rows)

    @property
    def due_ms(self) -> float | None:
        """When the window ends; None: it is not open."""
        if not self._parts:
            return None
        full = self.entries >= self.entries_max or self._bytes >= self.bytes_max
        return self._opened_ms + (0 if full else self.ms)

    @property
    def first_position(self) -> int | None:
        """The least position that waits; None: nothing does."""
        return min((int(part.positions.min()) for part in self._parts), default=None)

    def due(self, now_ms: float) -> ReleasedRows | None:
        """What has waited, merged, if the window is over; None: it is not, or nothing waits."""
        due_ms = self.due_ms
        return None if due_ms is None or now_ms < due_ms else self.flush()

    def flush(self) -> ReleasedRows | None:
        """The same without waiting for the end."""
        parts = self._parts
        self.clear()
        return coalesced(ReleasedRows.concat(parts)) if parts else None

    def clear(self) -> None:
        self._parts: list[ReleasedRows] = []
        self.entries = self._bytes = 0


def coalesced(rows: ReleasedRows) -> ReleasedRows:
    """Runs of deltas of a vector as one each, in the place of its last; `merged` says of each row
    where its first was, and how many are gone."""
    if len(rows) < 2:
        return rows
    # Of rows sorted by vector, those that go on from the one before them.
    order, follows = _runs(rows.batch)
    if not follows.any():
        return rows
    keep = np.ones(len(rows), np.bool_)
    spans, merged = rows.spans(), dict[int, bytes]()
    firsts, folded = spans.firsts.copy(), spans.folded.copy()
    ends = np.flatnonzero(follows & ~np.append(follows[1:], False))
    starts = np.flatnonzero(~follows & np.append(follows[1:], False))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        run = order[start : end + 1]
        payload = _merged(rows.batch, run)
        if len(payload) <= PAYLOAD_BYTES_MAX:
            keep[run[:-1]] = False
            merged[int(run[-1])] = payload
            firsts[run[-1]] = spans.firsts[run].min()
            folded[run[-1]] = spans.folded[run].sum() + len(run) - 1
    found = _replaced(rows, np.flatnonzero(keep), merged)
    return replace(found, merged=Merged(firsts, folded).take(keep))


def _runs(batch: DeltaBatch) -> tuple[Numbers, np.ndarray]:
    low, high = halves(batch.vector)
    order = np.argsort(low, kind="stable")
    op, time, origin = batch.op[order], batch.time[order], batch.origin[order]
    merges = (op == Op.SPARSE) | (op == Op.DENSE)
    follows = np.zeros(len(order), np.bool_)
    follows[1:] = merges[1:] & merges[:-1] & (time[1:] > time[:-1])
    for ids in (low[order], high[order], origin[:, 0], origin[:, 1]):
        follows[1:] &= ids[1:] == ids[:-1]
    return order, follows


def _merged(batch: DeltaBatch, run: Numbers) -> bytes:
    """The payload of a run."""
    first, last = batch.fixed[run[0]], batch.fixed[run[-1]]
    dense = np.flatnonzero(batch.op[run] == Op.DENSE)
    indices, values = _components(batch, run[dense[-1] :] if len(dense) else run)
    said = run[batch.fixed["metadata_bytes"][run] > 0]
    metadata = batch.metadata(int(said[-1])) if len(said) else b""
    flags = int(first["flags"]) & HAS_PARENT | (0 if len(dense) else HAS_INDICES)
    flags |= HAS_METADATA if metadata else 0
    payload = batch.payload(int(run[-1]))
    ragged = HEADER.size + CLOCK.size * int(last["clocks"])
    names = int(batch.names_at[run[-1]] - batch.starts[run[-1]])
    named = int(last["namespace_bytes"]) + int(last["vector_id_bytes"])
    header = HEADER.pack(
        int(last["version"]), Op.DENSE if len(dense) else Op.SPARSE,
        int(batch.priority[run].min()), int(last["source"]), len(values), int(last["clocks"]),
        flags, last["delta_id"].tobytes(), first["parent"].tobytes(), last["origin"].tobytes(),
        int(last["time"]), last["vector"].tobytes(), int(last["namespace_bytes"]),
        int(last["vector_id_bytes"]), len(metadata),
    )  # fmt: skip
    parts = [header, payload[HEADER.size : ragged]]
    parts.append(b"" if len(dense) else indices.astype("<u2").tobytes())
    parts += [values.astype("<f4").tobytes(), payload[names : names + named], metadata]
    return b"".join(parts)


def _components(batch: DeltaBatch, run: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Of each component that is named the last value, ascending."""
    offsets, indices, values = batch.components()
    spans = [np.arange(offsets[row], offsets[row + 1]) for row in run.tolist()]
    backwards = np.concatenate(spans)[::-1]
    named, at = np.unique(indices[backwards], return_index=True)
    return named, values[backwards[at]]


def _replaced(rows: ReleasedRows, keep: Numbers, merged: dict[int, bytes]) -> ReleasedRows:
    batch, view = rows.batch, memoryview(rows.batch.blob)
    starts, sizes = batch.starts[keep].tolist(), batch.sizes[keep].tolist()
    pieces = [
        merged[row] if row in merged else view[start : start + size]
        for row, start, size in zip(keep.tolist(), starts, sizes, strict=True)
    ]
    places = np.cumsum([0, *map(len, pieces)])[:-1]
    blob = b"".join(pieces)
    headers = batch.headers
    if headers is not None:
        headers = Binary.of(headers.take(keep))
    found = DeltaBatch(
        blob, places, gather(blob, places, FIXED), batch.sequences[keep],
        batch.log_times_ms[keep], headers,
    )  # fmt: skip
    return ReleasedRows(found, rows.positions[keep], rows.ordinals[keep])
