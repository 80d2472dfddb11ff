"""Who a replica is and what it has promised: one small file beside a partition's log.

A promise that was answered must never be forgotten, so the file is replaced as a whole and a
damaged one is refused: two slots in turn, as the floor has them, would fall back to an older
promise. A replica whose file is gone is a new replica, with another uuid.
"""

from __future__ import annotations

import uuid as uuids
from pathlib import Path
from threading import Lock
from typing import Final

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import make_folder, storage_errors, write_whole
from penstock.log.layout import ReplicaRecord

NAME: Final = "replica"


class ReplicaFile:
    """The identity and the promise of one replica; methods block and may run on any thread."""

    def __init__(self, folder: Path, *, uuid: str = "") -> None:
        """Read the file in a partition's folder; a missing one is made, with `uuid` if given."""
        self.path = folder / NAME
        self._lock = Lock()
        with storage_errors(folder):
            found = read_replica(self.path)
            if found is None:
                make_folder(folder)
                self._write(ReplicaRecord(0, uuid or str(uuids.uuid4())))
            else:
                self._record = found

    @classmethod
    def anew(cls, folder: Path) -> ReplicaFile:
        """A new replica's file in place of a damaged one: what that one promised is lost with it.

        Sound because a replica with another uuid has no vote until it is given one.
        """
        with storage_errors(folder):
            (folder / NAME).unlink(missing_ok=True)
        return cls(folder)

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

    def renew(self) -> str:
        """Become another replica, because the log was lost; what was promised stays promised."""
        with self._lock, storage_errors(self.path.parent):
            self._write(self._record._replace(uuid=str(uuids.uuid4())))
            return self.uuid

    def _write(self, record: ReplicaRecord) -> None:
        crash_point("log.replica.before")
        write_whole(self.path, [record.encode()])
        crash_point("log.replica.after")
        self._record = record


def read_replica(path: Path) -> ReplicaRecord | None:
    """The record in a replica file, None without one; raises `Corruption`."""
    try:
        return ReplicaRecord.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except Corruption as error:
        raise Corruption(
            f"{path}: {error.message}", file=str(path), offset=0, reason=error.message
        ) from error
