"""How far named subscribers and sinks have come, in the metadata store.

    cursors/<topic id>/<name>/<partition>    {"position": …, "time_ms": …}

Both are in one list, so that one call shows them all; names that begin with `sink-` are the sinks'.

A cursor that is behind the truth only means that something comes again, so it is noted in memory
and written a few times a second. Writes name the revision that this node knows: when another node
has taken the partition over and moved the cursor, what is noted here is dropped, and the cursor is
left alone until somebody reads it here again (`get`). A write whose outcome is unknown is repeated
as it was, so that the node can tell it from another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from penstock.cluster.store import MetadataStore, Versioned
from penstock.errors import InvalidArgument, PenstockError, RevisionConflict
from penstock.model.topic import NAME
from penstock.node.clock import Clock
from penstock.node.observe.logs import get_logger

PREFIX: Final = "cursors/"
SINK_PREFIX: Final = "sink-"
log = get_logger(__name__)


class LiveCursor(msgspec.Struct, frozen=True):
    """Everything up to `position` is handled; as of `time_ms`."""

    position: int
    time_ms: int


class CursorPlace(NamedTuple):
    topic: int
    name: str
    partition: int

    @property
    def key(self) -> str:
        return f"{PREFIX}{self.topic}/{self.name}/{self.partition}"


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"the name of a cursor must match {NAME.pattern}", field="cursor", limit=NAME.pattern
        )


class Cursors:
    def __init__(self, store: MetadataStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._noted: dict[CursorPlace, LiveCursor] = {}  # not written yet
        self._revisions: dict[
            CursorPlace, int
        ] = {}  # of those that this node moves, as it knows them
        self._sent: dict[CursorPlace, LiveCursor] = {}  # written perhaps: there was no answer
        self._lock = asyncio.Lock()  # one at a time, so that revisions are those of the last
        self._writing = False

    async def get(self, place: CursorPlace) -> LiveCursor | None:
        """Where a cursor stands; from now on this node moves it."""
        async with self._lock:
            entry = await self._store.get(place.key)
            revision = 0 if entry is None else entry.revision
            if revision != self._revisions.get(place) and not self._is_ours(place, entry):
                self._drop(place)  # it was moved elsewhere since
            self._revisions[place] = revision
            return self._latest(place, entry)

    def _is_ours(self, place: CursorPlace, entry: Versioned | None) -> bool:
        sent = self._sent.get(place)
        return sent is not None and entry is not None and entry.value == msgspec.json.encode(sent)

    def _drop(self, place: CursorPlace) -> None:
        for known in (self._noted, self._sent, self._revisions):
            known.pop(place, None)

    async def look(self, place: CursorPlace) -> LiveCursor | None:
        """Where a cursor stands, for who does not move it (yet)."""
        return self._latest(place, await self._store.get(place.key))

    def _latest(self, place: CursorPlace, entry: Versioned | None) -> LiveCursor | None:
        noted = self._noted.get(place)
        if noted is not None:
            return noted
        return None if entry is None else msgspec.json.decode(entry.value, type=LiveCursor)

    def note(self, place: CursorPlace, position: int) -> None:
        """It has come this far. To be written soon if this node moves it; `get` knows at once."""
        if place in self._revisions:
            self._noted[place] = LiveCursor(position, self._clock.now_ms())

    @property
    def due(self) -> bool:
        return bool(self._noted) and not self._writing

    async def flush(self) -> None:
        self._writing = True
        try:
            for place in list(self._noted):
                await self._write(place)
        finally:
            self._writing = False

    async def _write(self, place: CursorPlace) -> None:
        async with self._lock:
            cursor = self._sent.get(place) or self._noted.get(place)
            if cursor is None:
                return
            self._sent[place] = cursor
            try:
                revision = await self._put(place, cursor)
            except PenstockError as error:
                log.warning("a cursor was not saved", cursor=place.name, error=error.message)
                return
            if revision is None:
                log.info(
                    "a cursor was moved elsewhere", cursor=place.name, partition=place.partition
                )
                self._drop(place)
                return
            self._revisions[place] = revision
            self._sent.pop(place, None)
            if self._noted.get(place) == cursor:
                del self._noted[place]

    async def _put(self, place: CursorPlace, cursor: LiveCursor) -> int | None:
        """The revision under which it stands; None: another node moves it."""
        key, value = place.key, msgspec.json.encode(cursor)
        try:
            return await self._store.put(key, value, expected_revision=self._revisions[place])
        except RevisionConflict:
            entry = await self._store.get(key)
        if entry is None:  # deleted: who uses it goes on
            return await self._store.put(key, value, expected_revision=0)
        return entry.revision if self._is_ours(place, entry) else None

    async def rows(self, topic: int, after: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """For `cursor_list`, behind `after`, in order. The store is read whole, rows are lazy."""
        found: dict[CursorPlace, Versioned | None] = {}
        for entry in await self._store.range(f"{PREFIX}{topic}/"):
            _, _, name, partition = entry.key.split("/")
            found[CursorPlace(topic, name, int(partition))] = entry
        for place in self._noted:
            if place.topic == topic:
                found.setdefault(place, None)
        return self._rows(found, after)

    def _rows(
        self, found: dict[CursorPlace, Versioned | None], after: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        for place in sorted(found):
            name = f"{place.name} {place.partition:04}"
            if name > after:
                cursor = msgspec.to_builtins(self._latest(place, found[place]))
                yield name, {"name": place.name, "partition": place.partition, **cursor}

    async def delete(self, topic: int, name: str) -> int:
        """Forget a cursor in all partitions; in how many there was one."""
        async with self._lock:
            for known in (self._noted, self._sent):
                for place in [place for place in known if place[:2] == (topic, name)]:
                    del known[place]
            entries = await self._store.range(f"{PREFIX}{topic}/{name}/")
            for entry in entries:
                await self._store.delete(entry.key)
            return len(entries)

    def forget(self, topic: int) -> None:
        for known in (self._noted, self._sent, self._revisions):
            for place in [place for place in known if place.topic == topic]:
                del known[place]
