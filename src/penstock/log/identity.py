"""Who a replica and a data folder are: small files with one record, which they hold twice.

The two copies of a record lie in two disk sectors. A change overwrites the first, syncs, overwrites
the second, and syncs again. A torn write spoils one of them at most, and whoever waits for both to
be written can rely on the change: damage to either brings nothing older back. No space is needed
for it, so it works on a full disk.

A *replica* has a uuid and the epoch that it has promised to follow. A promise that was answered
must never be forgotten, so nobody is answered until both copies are written. With both copies
damaged the file is refused; a replica whose file is gone is a new replica, with another uuid.

A data folder has a *generation*. The metadata of the cluster hold the same, and it is raised at
every start and now and then. So a folder that was restored from an older copy is told from the one
that was there before: its generation is one that the metadata have left behind
(`penstock.node.cluster.cluster`). It is written here as *intended* before the metadata are told of
it, and as *current* after. Whichever moment the node ends at, one of the two is what the metadata
have.

A damaged replica's folder is *set aside*: the other replicas are asked for all that it held. Until
the new copy is whole nobody knows that they have it, so the old one is not deleted: one rename
takes it out of the way.
"""

from __future__ import annotations

import os
import shutil
import uuid as uuids
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, TypeVar

from penstock.errors import Corruption
from penstock.log.crash import crash_point
from penstock.log.files import Form, Handle, make_folder, storage_errors, sync_folder, write_whole
from penstock.model.columns import Buffer

STRIDE: Final = 512
FILE_BYTES: Final = 2 * STRIDE
R = TypeVar("R", bound=tuple[Any, ...])  # of two records, the greater one was written later
REPLICA_FILE: Final = "replica"
GENERATION_FILE: Final = "generation"
REPLICA: Final = Form("replica record", b"PSR1", "QQ64s36x")
GENERATION: Final = Form("generation record", b"PSG1", "QQ16sQ16s60x")


class ReplicaRecord(NamedTuple):
    generation: int  # the record with the greater one counts
    promised: int  # the highest epoch promised
    uuid: str  # at most 64 bytes

    def encode(self) -> bytes:
        text = self.uuid.encode()
        if not 0 < len(text) <= 64:
            raise ValueError(f"not a replica's uuid: {self.uuid!r}")
        return REPLICA.pack(self.generation, self.promised, text)

    @staticmethod
    def decode(data: Buffer) -> ReplicaRecord:
        _, generation, promised, text = REPLICA.unpack(data)
        return ReplicaRecord(generation, promised, text.rstrip(b"\0").decode())


class Generation(NamedTuple):
    """One of a data folder's. Two with the same number differ in their tokens."""

    number: int
    token: str  # 32 hexadecimal digits


class GenerationRecord(NamedTuple):
    written: int  # how often the file was written; the record with the greater one counts
    current: Generation  # the last that the metadata are known to have
    intended: Generation  # what the metadata may have, if the node ended while telling them

    def encode(self) -> bytes:
        current, intended = self.current, self.intended
        return GENERATION.pack(
            self.written, current.number, bytes.fromhex(current.token), intended.number,
            bytes.fromhex(intended.token),
        )  # fmt: skip

    @staticmethod
    def decode(data: Buffer) -> GenerationRecord:
        _, written, number, token, intended, wanted = GENERATION.unpack(data)
        return GenerationRecord(
            written, Generation(number, token.hex()), Generation(intended, wanted.hex())
        )


NO_GENERATION: Final = Generation(0, "0" * 32)  # what a folder has before its first
ASIDE_SUFFIX: Final = ".rot"


def create_twin(path: Path, record: bytes) -> None:
    write_whole(path, [(record + bytes(STRIDE - len(record))) * 2])


def write_twin(handle: Handle, record: bytes, *, written: str) -> None:
    """Overwrite both; `written` is the crash point after each."""
    for at in (0, STRIDE):
        handle.write([record], at)
        os.fdatasync(handle.fd)
        crash_point(written)


def read_twin(path: Path, decode: Callable[[bytes], R], *, size: int) -> tuple[R, bool]:
    """The record that counts, and whether the file has it twice; raises `Corruption`."""
    data = path.read_bytes()
    found: list[R] = []
    reason = "the file has another size"
    for at in (0, STRIDE) if len(data) == FILE_BYTES else ():
        try:
            found.append(decode(data[at : at + size]))
        except Corruption as error:
            reason = error.message
    if not found:
        raise Corruption(f"{path}: {reason}", file=str(path), offset=0, reason=reason)
    return max(found), len(found) == 2 and found[0] == found[1]


class ReplicaFile:
    """The identity and the promise of one replica; methods block and may run on any thread."""

    def __init__(self, folder: Path, *, uuid: str = "") -> None:
        """Read the file in a partition's folder; a missing one is made, with `uuid` if given."""
        self.path = folder / REPLICA_FILE
        self._lock = Lock()
        with storage_errors(folder):
            if not self.path.exists():
                make_folder(folder)
                create_twin(self.path, ReplicaRecord(1, 0, uuid or str(uuids.uuid4())).encode())
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

    def rename(self) -> None:
        """Become another replica, which has the same log and promise, and counts nowhere yet."""
        with self._lock, storage_errors(self.path.parent):
            self._write(self._record._replace(uuid=str(uuids.uuid4())))

    def _write(self, record: ReplicaRecord) -> None:
        record = record._replace(generation=self._record.generation + 1)
        crash_point("log.replica.before")
        write_twin(self._handle, record.encode(), written="log.replica.written")
        self._record = record


def read_replica(path: Path) -> tuple[ReplicaRecord, bool]:
    """The record that counts, and whether the file has it twice; raises `Corruption`."""
    return read_twin(path, ReplicaRecord.decode, size=REPLICA.size)


class GenerationFile:
    """Methods block. Raises `Corruption` if neither of the two records can be read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / GENERATION_FILE
        self.record = GenerationRecord(0, NO_GENERATION, NO_GENERATION)
        with storage_errors(folder):
            if self.path.exists():
                self.record, _ = read_twin(self.path, GenerationRecord.decode, size=GENERATION.size)

    def intend(self, generation: Generation) -> None:
        """Say durably what the metadata are told next."""
        self._write(self.record._replace(intended=generation))

    def settle(self, generation: Generation) -> None:
        """Say durably what the metadata have."""
        self._write(self.record._replace(current=generation, intended=generation))

    def _write(self, record: GenerationRecord) -> None:
        record = record._replace(written=record.written + 1)
        with storage_errors(self.path.parent):
            if record.written == 1:
                create_twin(self.path, record.encode())
            else:
                handle = Handle(self.path, os.O_RDWR)
                write_twin(handle, record.encode(), written="log.generation.written")
        self.record = record


def set_aside(folder: Path) -> Path:
    """Keep a partition's folder under another name, and begin one with a new replica in it. What
    was promised stays promised, if it can be read. A crash in between leaves no folder, and whoever
    opens that is a new replica too."""
    with storage_errors(folder):
        promised = _promised(folder)
        kept = next(path for path in _names(folder) if not path.exists())
        folder.rename(kept)
        sync_folder(folder.parent)
        ReplicaFile(folder).promise(promised)
        return kept


def asides(folder: Path) -> list[Path]:
    return sorted(folder.parent.glob(f"{folder.name}{ASIDE_SUFFIX}*"))


def remove_asides(folder: Path) -> None:
    for path in asides(folder):
        shutil.rmtree(path)


def _names(folder: Path) -> Iterator[Path]:
    """A copy that is damaged too, before it counts, gets a name of its own."""
    yield folder.with_name(folder.name + ASIDE_SUFFIX)
    for number in count(2):
        yield folder.with_name(f"{folder.name}{ASIDE_SUFFIX}{number}")


def _promised(folder: Path) -> int:
    path = folder / REPLICA_FILE
    if not path.exists():
        return 0
    try:
        return read_replica(path)[0].promised
    except Corruption:
        return 0  # a replica with another uuid has no vote until it is given one
