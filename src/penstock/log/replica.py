"""Who a replica is and what it has promised: one small file beside a partition's log.

A promise that was answered must never be forgotten. The file has the record twice, in two disk
sectors. A change overwrites the first, syncs, and overwrites the second: a torn write spoils one,
and until both are written nobody is answered, so damage to either cannot bring back less than was
promised. It needs no space on a full disk. With both records damaged the file is refused; a
replica whose file is gone is a new replica, with another uuid.
"""

from __future__ import annotations

import os
import uuid as uuids
from pathlib import Path
from threading import Lock
from typing import Final

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import Handle, make_folder, storage_errors, write_whole
from penstock.log.layout import REPLICA_SIZE, ReplicaRecord

NAME: Final = "replica"
STRIDE: Final = 512
FILE_BYTES: Final = 2 * STRIDE


class ReplicaFile:
    """The identity and the promise of one replica; methods block and may run on any thread."""

    def __init__(self, folder: Path, *, uuid: str = "") -> None:
        """Read the file in a partition's folder; a missing one is made, with `uuid` if given."""
        self.path = folder / NAME
        self._lock = Lock()
        with storage_errors(folder):
            if not self.path.exists():
                make_folder(folder)
                one = ReplicaRecord(1, 0, uuid or str(uuids.uuid4())).encode()
                write_whole(self.path, [(one + bytes(STRIDE - len(one))) * 2])
            self._record, whole = read_replica(self.path)
            self._handle = Handle(self.path, os.O_RDWR)
            if not whole:
                self._write(self._record)

    @property
    def uuid(self) -> str:
        return self._record.uuid

    @property
    def promised(self) -> int:
        """The highest epoch that this replica has promised to follow; it never falls."""
        return self._record.promised

    def promise(self, epoch: int) -> None:
        """Remember the promise durably. One that was made already costs nothing."""
        with self._lock, storage_errors(self.path.parent):
            if epoch < self.promised:
                raise ValueError(f"epoch {epoch} is below the promised {self.promised}")
            if epoch > self.promised:
                self._write(self._record._replace(promised=epoch))

    def _write(self, record: ReplicaRecord) -> None:
        record = record._replace(generation=self._record.generation + 1)
        crash_point("log.replica.before")
        for at in (0, STRIDE):
            self._handle.write([record.encode()], at)
            os.fdatasync(self._handle.fd)
            crash_point("log.replica.written")
        self._record = record


def read_replica(path: Path) -> tuple[ReplicaRecord, bool]:
    """The record that counts, and whether the file has it twice; raises `Corruption`."""
    data = path.read_bytes()
    found: list[ReplicaRecord] = []
    reason = "the file has another size"
    for at in (0, STRIDE) if len(data) == FILE_BYTES else ():
        try:
            found.append(ReplicaRecord.decode(data[at : at + REPLICA_SIZE]))
        except Corruption as error:
            reason = error.message
    if not found:
        raise Corruption(f"{path}: {reason}", file=str(path), offset=0, reason=reason)
    return max(found), len(found) == 2 and found[0] == found[1]
