"""Rewriting a sealed segment without its dead messages.

Ranges stay accounted for: a run of batches becomes one *compacted* batch that covers their
sequences and carries the chain of the last of them, so the next batch's chain, or the footer,
still proves the whole. A message's id contains its batch's time, so only messages of one time
share a compacted batch: dead batches are merged to the right, into the next batch that keeps
something.

A batch all of whose messages live is copied as it is, and so is a PREPARE batch with any living
message, because a compacted batch has nowhere to name its transaction. Rewriting is only sound for
segments that a snapshot covers, for it drops leases, settlements and producers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.log.crash import crash_point
from penstock.log.files import FOOTER, Handle
from penstock.log.segment import OpenedSegment, Segment, verify_sealed
from penstock.log.walk import BatchIndex, Walk
from penstock.model.batch import SCHEMAS, Batch, Codec, Kind, compress, seal_compacted

BODY_BYTES_TARGET: Final = 1 << 20  # a merged body grows no further once it has this much
_CARRIERS: Final = frozenset({Kind.ENQ, Kind.PREPARE})
_FIXED: Final = ("priority", "delay_ms", "max_retries")
_BINARY: Final = ("key", "headers", "payload")


def compact(
    segment: Segment, alive: NDArray[np.uint64], *, target: Path
) -> tuple[Segment, BatchIndex] | None:
    """Write the segment with only the messages in `alive` to the file `target`, durably.

    Returns the segment as it is once that file has taken the old one's place, with its index, or
    None, with no file left, when there is nothing to gain.
    """
    handle = Handle(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    crash_point("log.rewrite.before")
    new = None
    try:
        new = _copy(segment, alive, handle=handle)
    finally:
        if new is None:
            target.unlink()
    crash_point("log.rewrite.synced")
    return new


def _copy(
    segment: Segment, alive: NDArray[np.uint64], *, handle: Handle
) -> tuple[Segment, BatchIndex] | None:
    new = Segment(segment.path, segment.header._replace(compacted=True))
    new.end = handle.write([new.header.encode()], 0)
    walk = segment.walk(Handle(segment.path))
    index = BatchIndex()
    for batch in _compacted(walk, alive):
        index.add(batch.first, new.end)
        new.end = handle.write([batch.header, batch.body, bytes(-batch.size & 7)], new.end)
        new.batches += 1
    verify_sealed(segment, walk)
    if new.end >= segment.end:
        return None
    new.last, new.chain, new.epoch = segment.last, segment.chain, segment.epoch
    new.time_ms, new.sealed, new.opened = segment.time_ms, True, OpenedSegment(handle, index)
    handle.write([FOOTER.pack(*new.footer())], new.end)
    os.fsync(handle.fd)
    return new, index


class _Run:
    """Batches that will become one: `entries` living messages, all of the newest one's time."""

    def __init__(self, batch: Batch) -> None:
        self.oldest = self.newest = batch
        self.entries = self.bytes = 0
        self.sequences: list[NDArray[np.uint64]] = []
        self.fixed: dict[str, list[NDArray[Any]]] = {name: [] for name in _FIXED}
        self.binary: dict[str, list[bytes]] = {name: [] for name in _BINARY}

    def accepts(self, batch: Batch) -> bool:
        """Whether a batch with living messages may join without changing anyone's time."""
        same = self.entries == 0 or self.newest.time_ms == batch.time_ms
        return same and self.bytes < BODY_BYTES_TARGET

    def keep(
        self, batch: Batch, positions: NDArray[np.int64], sequences: NDArray[np.uint64]
    ) -> None:
        columns = batch.columns()
        self.entries += len(positions)
        self.sequences.append(sequences[positions])
        for name in _FIXED:
            self.fixed[name].append(columns.fixed(name)[positions])
        for name in _BINARY:
            cell = columns.binary(name)
            values = [b""] * len(positions) if cell is None else cell.take(positions)
            self.binary[name].extend(values)
            self.bytes += sum(map(len, values))

    def seal(self) -> Batch:
        schema = SCHEMAS[Kind.ENQ]
        values: dict[str, Any] = {}
        if self.entries:
            values = {"sequence": np.concatenate(self.sequences)}
            values |= {name: np.concatenate(parts) for name, parts in self.fixed.items()}
            values |= {name: cells for name, cells in self.binary.items() if any(cells)}
        raw = schema.encode(self.entries, values)
        codec = self.newest.codec if self.entries else Codec.NONE
        return seal_compacted(
            raw if codec is Codec.NONE else compress(codec, raw),
            entries=self.entries, covers=(self.oldest, self.newest), codec=codec,
            raw_length=len(raw),
        )  # fmt: skip


def _compacted(walk: Walk, alive: NDArray[np.uint64]) -> Iterator[Batch]:
    run: _Run | None = None
    for _, batch in walk:
        sequences = _message_sequences(batch)
        positions = np.flatnonzero(np.isin(sequences, alive, assume_unique=True))
        whole = len(positions) == batch.entries and not batch.compacted
        if len(positions) and (whole or batch.kind is Kind.PREPARE):
            if run is not None:
                yield run.seal()
                run = None
            yield batch
            continue
        if run is not None and len(positions) and not run.accepts(batch):
            yield run.seal()
            run = None
        if run is None:
            run = _Run(batch)
        # A dead batch must not carry the living ones before it into its own time.
        if run.entries and not len(positions) and batch.time_ms != run.newest.time_ms:
            yield run.seal()
            run = _Run(batch)
        run.newest = batch
        if len(positions):
            run.keep(batch, positions, sequences)
    if run is not None:
        yield run.seal()


def _message_sequences(batch: Batch) -> NDArray[np.uint64]:
    if batch.kind not in _CARRIERS:
        return np.empty(0, np.uint64)
    if batch.compacted:
        return batch.columns().fixed("sequence") if batch.entries else np.empty(0, np.uint64)
    return np.arange(batch.first, batch.last + 1, dtype=np.uint64)
