"""Snapshots of a partition's state: one file each, the last two kept.

A snapshot file is a CRC'd header and the state's bytes. It appears by one rename after it is
durable, so a half-written one is never seen; two are kept so that a damaged one costs time, not
data.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from crc32c import crc32c

from penstock.errors import Corruption
from penstock.log.crash import crash_armed, crash_point
from penstock.log.files import SNAPSHOT, Handle, SnapshotHeader, sync_folder
from penstock.model.columns import Buffer

KEPT: Final = 2
_log = logging.getLogger(__name__)


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
