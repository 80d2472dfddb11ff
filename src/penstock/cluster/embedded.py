"""The metadata store of one node: a file in its data folder.

Changes are staged in memory, then the whole map is stored as a new image, in a thread. Whoever
holds the write lock stores for everybody who staged until then, so a thousand epochs asked for at
once cost two writes. There are two maps:

- `_staged` is what has been accepted; compare and swap looks at it, so no update is lost;
- `_stored` is what is on disk; reads and watches see nothing else.

A refusal waits until what it lost against is stored. The caller that reads again, to try again,
then sees why it lost.

A full disk refuses the changes that wait and leaves the old image in place. Any other failure
ends the store: what is on disk is unknown from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.cluster.changes import ChangeQueue
from penstock.cluster.image import read_image, write_image
from penstock.cluster.store import Change, Versioned, check_entry
from penstock.errors import DiskFull, PenstockError, RevisionConflict, StorageFailed, Unavailable


class EmbeddedStore:
    """Use it from one event loop; the data folder's lock keeps other processes out.

    Making one reads what is stored, which blocks shortly: do it in a thread, or before serving.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        image = read_image(folder)
        self._folder = folder
        self._revision = image.revision  # of the last staged change; never used twice
        self._staged = dict(image.entries)
        self._stored = image.entries
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
        await self._store(Change(key, value, revision))
        return revision

    async def delete(self, key: str, *, expected_revision: int | None = None) -> bool:
        await self._expect(key, expected_revision)
        if self._staged.pop(key, None) is None:
            await self._settle()
            return False
        await self._store(Change(key, None, self._revision + 1))
        return True

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[Change]]:
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

    async def _store(self, change: Change) -> None:
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
        except DiskFull as refusal:
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
            stored.exception()  # seen, also where its caller was cancelled

    def _end(self, failure: PenstockError) -> None:
        self._failure = failure
        for watch in self._watches:
            watch.end(failure)


class _Pending(NamedTuple):
    """A staged change, and whom to tell that it is stored or refused."""

    change: Change
    stored: asyncio.Future[None]
