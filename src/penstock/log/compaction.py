"""A sealed segment without its dead messages, and the snapshots that make it safe to drop them.

Ranges stay accounted for: a run of batches becomes one *compacted* batch that covers their
sequences and carries the chain of the last of them, so the next batch's chain, or the footer, still
proves the whole. A message's id contains its batch's time, so only messages of one time share a
compacted batch: dead batches are merged to the right, into the next batch that keeps something.

A batch all of whose messages live is copied as it is, and so is a PREPARE batch with any living
message, because a compacted batch has nowhere to name its transaction. Rewriting is only sound for
segments that a snapshot covers, for it drops leases, settlements and producers.

A snapshot file is a CRC'd header and the state's bytes. It appears by one rename after it is
durable, so a half-written one is never seen; two are kept so that a damaged one costs time, not
data.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from penstock.errors import Corruption
from penstock.log.crash import crash_armed, crash_point
from penstock.log.files import FOOTER, Form, Handle, sync_folder
from penstock.log.segment import OpenedSegment, Segment, verify_sealed
from penstock.log.walk import BatchIndex, Walk
from penstock.model.batch import SCHEMAS, Batch, Codec, Kind, compress, seal_compacted
from penstock.model.columns import Buffer

KEPT: Final = 2
_log = logging.getLogger(__name__)


SNAPSHOT: Final = Form("snapshot header", b"PSN1", "IIQQIIQq20x")


class SnapshotHeader(NamedTuple):
    topic: int
    partition: int
    sequence: int
    chain: int
    epoch: int
    crc: int  # of the data
    length: int
    time_ms: int  # wall clock when it was taken


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """The state after every batch up to `sequence`, where the log's chain was `chain`."""

    sequence: int
    chain: int
    epoch: int
    data: Buffer
    time_ms: int


class SnapshotFiles:
    def __init__(self, folder: Path, *, topic: int, partition: int) -> None:
        self.folder, self.topic, self.partition = folder, topic, partition

    def sequences(self) -> list[int]:
        """Where the snapshots on disk are, oldest first. The log is kept from the oldest one on."""
        return sorted(int(path.stem, 16) for path in self.folder.glob("*.snap"))

    def save(self, *, sequence: int, chain: int, epoch: int, parts: Sequence[Buffer]) -> int:
        crc = length = 0
        for part in parts:
            crc, length = crc32c(part, crc), length + len(memoryview(part).cast("B"))
        header = SnapshotHeader(
            self.topic, self.partition, sequence, chain, epoch, crc, length, time.time_ns() // 10**6
        )
        path = self._path(sequence)
        new = path.with_name(path.name + ".tmp")
        try:
            self._write(new, [SNAPSHOT.pack(*header), *parts])
            new.rename(path)
        finally:
            new.unlink(missing_ok=True)
        crash_point("log.snapshot.renamed")
        sync_folder(self.folder)
        for old in self.sequences()[:-KEPT]:
            self._path(old).unlink()
        crash_point("log.snapshot.after")
        return SNAPSHOT.size + length

    @staticmethod
    def _write(new: Path, buffers: list[Buffer]) -> None:
        crash_point("log.snapshot.before")
        handle = Handle(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if crash_armed("log.snapshot.torn"):
            handle.write(buffers[: len(buffers) // 2], 0)
        crash_point("log.snapshot.torn")
        handle.write(buffers, 0)
        os.fsync(handle.fd)
        crash_point("log.snapshot.synced")

    def load(self, *, through: int) -> StoredSnapshot | None:
        """The newest valid one at or below `through`; a damaged one is reported and passed over."""
        for sequence in reversed(self.sequences()):
            path = self._path(sequence)
            try:
                snapshot = read_snapshot(path, topic=self.topic, partition=self.partition)
            except Corruption as error:
                _log.error("a damaged snapshot is passed over: %s", error.message)
                continue
            if sequence <= through:
                return snapshot
            _log.error("%s is ahead of the log, which ends at %d", path, through)
        return None

    def _path(self, sequence: int) -> Path:
        return self.folder / f"{sequence:016x}.snap"


def read_snapshot(path: Path, *, topic: int, partition: int) -> StoredSnapshot:
    """Read and verify one snapshot file; raises `Corruption`."""
    data = memoryview(path.read_bytes())
    try:
        header = SnapshotHeader(*SNAPSHOT.unpack(bytes(data[: SNAPSHOT.size]))[1:])
        body = data[SNAPSHOT.size :]
        if (header.topic, header.partition, f"{header.sequence:016x}") != (
            topic, partition, path.stem,
        ):  # fmt: skip
            raise Corruption("the snapshot belongs elsewhere")
        if len(body) != header.length or crc32c(body) != header.crc:
            raise Corruption("CRC mismatch in a snapshot")
    except Corruption as error:
        raise Corruption(
            f"{path}: {error.message}", topic=topic, partition=partition,
            sequence=int(path.stem, 16), file=str(path), offset=0, reason=error.message,
        ) from error  # fmt: skip
    return StoredSnapshot(header.sequence, header.chain, header.epoch, body, header.time_ms)


BODY_BYTES_TARGET: Final = 1 << 20  # a merged body grows no further once it has this much
_CARRIERS: Final = frozenset({Kind.ENQ, Kind.PREPARE})
_FIXED: Final = ("priority", "delay_ms", "max_retries")
_BINARY: Final = ("key", "headers", "payload")


def compact(
    segment: Segment, alive: NDArray[np.uint64], *, target: Path
) -> tuple[Segment, BatchIndex] | None:
    """Write the segment with only the messages in `alive` to the file `target`, durably. Returns it
    as it is once that file has taken the old one's place, with its index; None, and no file, if
    nothing is gained."""
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
    new.adopt(segment.footer()._replace(end=new.end, batches=new.batches))
    new.sealed, new.opened = True, OpenedSegment(handle, index)
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

    def accepts(self, batch: Batch, *, living: bool) -> bool:
        """Whether a batch may join without changing anyone's time: neither may one with living
        messages get the time of others, nor a dead one carry those before it into its own."""
        same = self.entries == 0 or self.newest.time_ms == batch.time_ms
        return same and (self.bytes < BODY_BYTES_TARGET or not living)

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
        living = len(positions) > 0
        whole = len(positions) == batch.entries and not batch.compacted
        stays = living and (whole or batch.kind is Kind.PREPARE)
        if run is not None and (stays or not run.accepts(batch, living=living)):
            yield run.seal()
            run = None
        if stays:
            yield batch
            continue
        run = run or _Run(batch)
        run.newest = batch
        if living:
            run.keep(batch, positions, sequences)
    if run is not None:
        yield run.seal()


def _message_sequences(batch: Batch) -> NDArray[np.uint64]:
    if batch.kind not in _CARRIERS:
        return np.empty(0, np.uint64)
    if batch.compacted:
        return batch.columns().fixed("sequence") if batch.entries else np.empty(0, np.uint64)
    return np.arange(batch.first, batch.last + 1, dtype=np.uint64)
