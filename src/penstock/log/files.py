"""Files as the log needs them: handles and whole writes, and the records round the batches.

Every byte on disk is under some CRC. A segment file is

    header (64) | flush mark (32) batch batch … | flush mark (32) batch … | footer (64) once sealed

with each batch padded by zeros to 8 bytes. All numbers are little-endian and every record ends in a
CRC32C of the bytes before it. `docs/data-format.md` has the byte tables.

A *flush mark* opens each group of batches that became durable by one sync. It says what was
durable when the group was written, and that is what tells rot from a torn tail: a disk may keep a
later block of an unsynced group and lose an earlier one, so a valid batch behind a bad one proves
nothing by itself, but a mark that calls the bad batch durable does.
"""

from __future__ import annotations

import errno
import os
import resource
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from penstock.errors import Corruption, DiskFull, LimitExceeded, StorageFailed
from penstock.model.columns import Buffer

IOV_MAX: Final = 1024
FILE_MODE: Final = 0o600  # the node's user alone, whatever the umask
FOLDER_MODE: Final = 0o700
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
TOO_MANY: Final = frozenset({errno.EMFILE, errno.ENFILE})  # too many files are open
_NO_NOWAIT: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL})
SYNC_ROUNDS: Final = 20
SYNC_BLOCK: Final = b"penstock" * 512


class Handle:
    """An open file that closes when its last user lets go.

    A reader on one thread may still hold the file that another thread has just replaced or
    deleted; a descriptor closed under it could by then be another file's.
    """

    __slots__ = ("fd",)

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.fd = -1
        self.fd = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes, fewer only at the end of the file."""
        data = os.pread(self.fd, length, offset)
        if len(data) == length or not data:
            return data
        return data + self.read(length - len(data), offset + len(data))

    def read_nowait(self, length: int, offset: int) -> Buffer | None:
        """The bytes if the page cache has them all, else None at once."""
        data = bytearray(length)
        try:
            if os.preadv(self.fd, [data], offset, os.RWF_NOWAIT) == length:
                return data
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _NO_NOWAIT:
                raise
            return self.read(length, offset)  # such a file system (tmpfs) lives in memory
        return None

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        """Write all of the buffers one after the other; returns the offset behind them."""
        for at in range(0, len(buffers), IOV_MAX):
            chunk = buffers[at : at + IOV_MAX]
            total = sum(map(len, chunk))
            done = os.pwritev(self.fd, chunk, offset)
            if done < total:  # a signal or a nearly full disk: go on, the next call says which
                joined = memoryview(b"".join(chunk))
                while done < total:
                    done += os.pwrite(self.fd, joined[done:], offset + done)
            offset += total
        return offset


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Speak of failing files in the system's own words."""
    try:
        yield
    except OSError as error:
        if error.errno in TOO_MANY:
            raise LimitExceeded(
                f"{folder}: {error.strerror}; raise the limit of open files (ulimit -n, "
                "LimitNOFILE)",
                limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            ) from error
        kind = DiskFull if error.errno in FULL else StorageFailed
        raise kind(f"{folder}: {error}") from error


def sync_folder(path: Path) -> None:
    """Make renames, creations and deletions in a folder durable."""
    handle = Handle(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(handle.fd)


def make_folder(path: Path) -> None:
    """Make a partition's folder, if it is missing, so that it is still there after a power cut."""
    if not path.is_dir():
        path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)  # the topic's folder
        path.mkdir(FOLDER_MODE, exist_ok=True)
        sync_folder(path.parent)
        sync_folder(path.parent.parent)


def write_whole(path: Path, buffers: Sequence[Buffer], *, new: Path | None = None) -> None:
    """Create or replace a file in one step that a crash cannot split, and make it durable. It is
    written as `new`, which several who write the same file at once must choose apart."""
    new = new or path.with_name(path.name + ".tmp")
    try:
        handle = Handle(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        handle.write(buffers, 0)
        os.fsync(handle.fd)
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)  # half a file must not keep what little space there is
        raise
    sync_folder(path.parent)


class SyncTimes(NamedTuple):
    median_ms: float
    worst_ms: float

    def __str__(self) -> str:
        return f"median {self.median_ms:.2f} ms, worst {self.worst_ms:.2f} ms"


def measure_sync(folder: Path) -> SyncTimes:
    """How long the disk of a folder takes to sync: each acknowledgement waits for that at least."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".sync-") as file:
        took = [_sync_ms(file.fileno(), turn) for turn in range(SYNC_ROUNDS)]
    return SyncTimes(statistics.median(took), max(took))


def _sync_ms(descriptor: int, turn: int) -> float:
    os.pwrite(descriptor, SYNC_BLOCK, turn * len(SYNC_BLOCK))
    start = time.perf_counter()
    os.fdatasync(descriptor)
    return (time.perf_counter() - start) * 1000


# --- records ---

_CRC: Final = struct.Struct("<I")


class Form:
    """How one kind of record lies on disk: magic, version, flags, its fields, and a CRC of that."""

    def __init__(self, what: str, magic: bytes, fields: str, *, version_max: int = 1) -> None:
        self._what, self._magic, self._version_max = what, magic, version_max
        self._struct = struct.Struct("<4sHH" + fields)
        self.size = self._struct.size + _CRC.size

    def pack(self, *fields: object, flags: int = 0, version: int = 1) -> bytes:
        record = self._struct.pack(self._magic, version, flags, *fields)
        return record + _CRC.pack(crc32c(record))

    def unpack(self, data: Buffer) -> tuple[Any, ...]:
        """The fields, behind the flags; raises `Corruption` unless size, magic, CRC and version
        are what they must be."""
        if len(data) != self.size:
            raise Corruption(f"a {self._what} is cut short")
        record = data[: -_CRC.size]
        magic, version, *fields = self._struct.unpack(record)
        if magic != self._magic or data[-_CRC.size :] != _CRC.pack(crc32c(record)):
            raise Corruption(f"CRC mismatch in a {self._what}")
        if not 1 <= version <= self._version_max:
            raise Corruption(f"version {version} of a {self._what} is over {self._version_max}")
        return tuple(fields)


SEGMENT: Final = Form("segment header", b"PSS1", "IIQQI24x")
FOOTER: Final = Form("segment footer", b"PSF1", "QQQqQII4x")
MARK_MAGIC: Final = 0x314D5350  # "PSM1"
_MARK: Final = struct.Struct("<IIQQI")
_PLACE: Final = struct.Struct("<IIQ")
HEADER_SIZE: Final = SEGMENT.size
FOOTER_SIZE: Final = FOOTER.size
MARK_SIZE: Final = _MARK.size + _CRC.size

COMPACTED: Final = 1  # flags of a segment
SEEDED: Final = 2


def padded(size: int) -> int:
    return (size + 7) & ~7


class SegmentHeader(NamedTuple):
    topic: int
    partition: int
    first: int
    chain_before: int
    epoch_before: int
    compacted: bool = False  # rewritten: no flush marks in it
    seeded: bool = False  # received whole, so it may hold compacted batches

    def encode(self) -> bytes:
        return SEGMENT.pack(*self[:5], flags=self.compacted * COMPACTED | self.seeded * SEEDED)

    @staticmethod
    def decode(data: Buffer) -> SegmentHeader:
        flags, *fields = SEGMENT.unpack(data)
        header = SegmentHeader(*fields)
        return header._replace(compacted=bool(flags & COMPACTED), seeded=bool(flags & SEEDED))


class Footer(NamedTuple):
    first: int
    last: int
    chain: int
    time_ms: int
    end: int  # where the footer begins: the file has `end + FOOTER_SIZE` bytes
    batches: int
    epoch: int


class Mark(NamedTuple):
    """Its CRC starts from the place it stands at, so a copy of it inside a payload is no mark."""

    length: int  # bytes of the group, this mark included
    durable: int  # last durable sequence when the group was written
    first: int  # the group's first sequence
    batches: int

    def encode(self, header: SegmentHeader, offset: int) -> bytes:
        record = _MARK.pack(MARK_MAGIC, *self)
        place = crc32c(_PLACE.pack(header.topic, header.partition, offset))
        return record + _CRC.pack(crc32c(record, place))

    @staticmethod
    def decode(data: Buffer, at: int, *, header: SegmentHeader, offset: int) -> Mark:
        magic, *fields = _MARK.unpack_from(data, at)
        (crc,) = _CRC.unpack_from(data, at + _MARK.size)
        place = crc32c(_PLACE.pack(header.topic, header.partition, offset))
        if magic != MARK_MAGIC or crc != crc32c(data[at : at + _MARK.size], place):
            raise Corruption("CRC mismatch in a flush mark")
        return Mark(*fields)
