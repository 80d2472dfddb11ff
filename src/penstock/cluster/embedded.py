"""The metadata store of one node: a file in its data folder.

Changes are staged in memory, then the whole map is stored as a new image, in a thread. Whoever
holds the write lock stores for everybody who staged until then, so a thousand epochs asked for at
once cost two writes. There are two maps:

- `_staged` is what has been accepted; compare and swap looks at it, so no update is lost;
- `_stored` is what is on disk; reads and watches see nothing else.

A refusal waits until what it lost against is stored. The caller that reads again, to try again,
then sees why it lost. A full disk, or that no file can be opened, refuses the changes that wait and
leaves the old image in place. Any other failure ends the store: what is on disk is unknown from
then on.

The file is one image of the whole map, replaced atomically:

    "PSTKMETA" | u32 format | u32 CRC32C of the body | u64 body length | body (msgpack)

All integers are big-endian. The body is `[revision, [[key, value, revision, revision_created] …]]`.
A reader that meets a newer format refuses it; anything else that does not add up is `Corruption`.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from crc32c import crc32c

from penstock.cluster.reserve import NO_SPACE, TOO_MANY, Reserve, private
from penstock.cluster.store import ChangeQueue, MetadataChange, Versioned, check_entry
from penstock.errors import (
    Backpressure,
    Corruption,
    DiskFull,
    FailedPrecondition,
    LimitExceeded,
    PenstockError,
    RevisionConflict,
    StorageFailed,
    Unavailable,
)

MAGIC: Final = b"PSTKMETA"
FORMAT: Final = 1
FILE: Final = "store.bin"
RESERVE_BYTES: Final = 256 << 10
_HEADER: Final = struct.Struct(">8sIIQ")
_Rows = list[tuple[str, bytes, int, int]]
_decoder: Final = msgspec.msgpack.Decoder(tuple[int, _Rows])


def read_image(folder: Path) -> tuple[int, dict[str, Versioned]]:
    """The stored map and its revision; empty if the folder has none yet."""
    path = folder / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0, {}
    if len(data) < _HEADER.size:
        raise Corruption(f"{path} is shorter than its header", file=str(path))
    magic, format, crc, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Corruption(f"{path} is not a metadata image", file=str(path))
    if format > FORMAT:
        raise FailedPrecondition(
            f"{path} has format {format}, this version reads up to {FORMAT}", file=str(path)
        )
    body = data[_HEADER.size :]
    if format != FORMAT or len(body) != length or crc32c(body) != crc:
        raise Corruption(f"{path} does not match its checksum", file=str(path))
    revision, rows = _decoder.decode(body)
    return revision, {row[0]: Versioned(*row) for row in rows}


def write_image(folder: Path, revision: int, entries: Iterable[Versioned]) -> None:
    """Replace the stored map. On return it survives a power loss. `DiskFull`, and `LimitExceeded`
    where no file can be opened, leave the old one."""
    body = msgspec.msgpack.encode((revision, [tuple(entry) for entry in entries]))
    data = _HEADER.pack(MAGIC, FORMAT, crc32c(body), len(body)) + body
    try:
        # The folder is opened first: if no file can be opened, nothing has changed yet.
        descriptor = _open(str(folder), os.O_RDONLY | os.O_DIRECTORY)
        try:
            _replace(folder, data, descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageFailed(f"cannot write metadata in {folder}: {error}") from error


def _replace(folder: Path, data: bytes, descriptor: int) -> None:
    fresh = folder / (FILE + ".new")
    reserve = Reserve(folder / "reserve", RESERVE_BYTES)
    try:
        reserve.write(lambda: _write_file(fresh, data))
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        fresh.unlink(missing_ok=True)
        raise DiskFull("no space for metadata") from error
    fresh.replace(folder / FILE)
    os.fsync(descriptor)
    reserve.hold()


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "wb", opener=_open) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _open(path: str, flags: int) -> int:
    try:
        return private(path, flags)
    except OSError as error:
        if error.errno not in TOO_MANY:
            raise
        raise LimitExceeded(
            f"no file can be opened for metadata: {error.strerror}; raise the limit of open files "
            "(ulimit -n, LimitNOFILE)"
        ) from error


class EmbeddedStore:
    """Use it from one event loop; the data folder's lock keeps other processes out. Making one
    reads what is stored, which blocks shortly: do it in a thread, or before serving."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self._folder = folder
        # The revision is of the last staged change; none is used twice.
        self._revision, self._stored = read_image(folder)
        self._staged = dict(self._stored)
        self._pending: list[_Pending] = []  # what `_staged` has and `_stored` has not
        self._write_lock = asyncio.Lock()
        self._failure: PenstockError | None = None  # set once; refuses all further changes
        self._watches: set[ChangeQueue] = set()

    async def get(self, key: str) -> Versioned | None:
        return self._stored.get(key)

    async def range(self, prefix: str) -> list[Versioned]:
        return [self._stored[key] for key in sorted(self._stored) if key.startswith(prefix)]

    async def put(self, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        check_entry(key, value)
        await self._expect(key, expected_revision)
        held = self._staged.get(key)
        revision = self._revision + 1
        created = held.revision_created if held else revision
        self._staged[key] = Versioned(key, value, revision, created)
        await self._store(MetadataChange(key, value, revision))
        return revision

    async def delete(self, key: str, *, expected_revision: int | None = None) -> bool:
        await self._expect(key, expected_revision)
        if self._staged.pop(key, None) is None:
            await self._settle()
            return False
        await self._store(MetadataChange(key, None, self._revision + 1))
        return True

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[MetadataChange]]:
        if self._failure:
            raise self._failure
        watch = ChangeQueue(prefix)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    async def close(self) -> None:
        """Store what is staged; later changes and open watches get `Unavailable`."""
        if self._failure is None:
            await self._settle()
            self._end(Unavailable("the metadata store is closed"))

    async def _expect(self, key: str, expected: int | None) -> None:
        """Raise unless the staged entry has the expected revision. It yields to the loop only if
        it raises, so the caller stages its change on exactly what was checked."""
        if self._failure:
            raise self._failure
        held = self._staged.get(key)
        revision = held.revision if held else 0
        if expected is not None and expected != revision:
            await self._settle()
            raise RevisionConflict(
                f"{key} is at revision {revision}, not {expected}", key=key, revision=revision
            )

    async def _store(self, change: MetadataChange) -> None:
        self._revision = change.revision
        self._pending.append(_Pending(change, asyncio.get_running_loop().create_future()))
        await self._settle()

    async def _settle(self) -> None:
        """Wait until all that is staged now is stored. A caller that is cancelled does not stop
        the write: others wait for it, and it may not overlap the next one."""
        if self._pending:
            await asyncio.shield(self._write_through(self._pending[-1]))

    async def _write_through(self, last: _Pending) -> None:
        async with self._write_lock:
            if not last.stored.done():
                await self._write_staged()
        await last.stored

    async def _write_staged(self) -> None:
        revision, entries, pending = self._revision, dict(self._staged), list(self._pending)
        values = list(entries.values())
        try:
            await asyncio.to_thread(write_image, self._folder, revision, values)
        except Backpressure as refusal:
            self._refuse(refusal)
        except StorageFailed as failure:
            self._refuse(failure)
            self._end(failure)
        else:
            self._stored = entries
            del self._pending[: len(pending)]
            for change, stored in pending:
                stored.set_result(None)
                for watch in self._watches:
                    watch.offer(change)

    def _refuse(self, reason: PenstockError) -> None:
        """Take back all that is staged: what came during the write was checked against it."""
        pending, self._pending = self._pending, []
        self._staged = dict(self._stored)
        for _, stored in pending:
            stored.set_exception(reason)
            stored.exception()  # nobody may wait for it any more, if its caller was cancelled

    def _end(self, failure: PenstockError) -> None:
        self._failure = failure
        for watch in self._watches:
            watch.end(failure)


class _Pending(NamedTuple):
    """A staged change, and whom to tell that it is stored or refused."""

    change: MetadataChange
    stored: asyncio.Future[None]
