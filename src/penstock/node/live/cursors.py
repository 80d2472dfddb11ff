"""How far named subscribers and sinks have come, in the metadata store.

    cursors/<topic id>/<name>/<partition>    {"position": …, "time_ms": …}

Both are in one list, so that one call shows them all; names that begin with `sink-` are the sinks'.

A cursor that is behind the truth only means that something comes again, so it is noted in memory
and written a few times a second. Writes name the revision that this node knows: when another node
has taken the partition over and moved the cursor on, what is noted here is dropped.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from penstock.cluster.store import MetadataStore, Versioned
from penstock.errors import InvalidArgument, PenstockError, RevisionConflict
from penstock.model.topic import NAME
from penstock.node.clock import Clock
from penstock.node.logs import get_logger

PREFIX: Final = "cursors/"
SINK_PREFIX: Final = "sink-"
log = get_logger(__name__)


class Cursor(msgspec.Struct, frozen=True):
    """Everything up to `position` is handled; as of `time_ms`."""

    position: int
    time_ms: int


class Place(NamedTuple):
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
        self._noted: dict[Place, Cursor] = {}  # not written yet
        self._revisions: dict[Place, int] = {}  # as this node knows them
        self._writing = False

    async def get(self, place: Place) -> Cursor | None:
        """Where a cursor stands; from now on this node moves it."""
        entry = await self._store.get(place.key)
        self._revisions[place] = 0 if entry is None else entry.revision
        return self._latest(place, entry)

    async def look(self, place: Place) -> Cursor | None:
        """Where a cursor stands, for who does not move it (yet)."""
        return self._latest(place, await self._store.get(place.key))

    def _latest(self, place: Place, entry: Versioned | None) -> Cursor | None:
        noted = self._noted.get(place)
        if noted is not None:
            return noted
        return None if entry is None else msgspec.json.decode(entry.value, type=Cursor)

    def note(self, place: Place, position: int) -> None:
        """It has come this far. To be written soon; `get` knows it at once."""
        self._noted[place] = Cursor(position, self._clock.now_ms())

    @property
    def due(self) -> bool:
        return bool(self._noted) and not self._writing

    async def flush(self) -> None:
        """Write what is noted."""
        self._writing = True
        try:
            for place in list(self._noted):
                await self._write(place)
        finally:
            self._writing = False

    async def _write(self, place: Place) -> None:
        cursor = self._noted.get(place)
        if cursor is None:
            return
        known = self._revisions.get(place)
        try:
            self._revisions[place] = await self._store.put(
                place.key, msgspec.json.encode(cursor), expected_revision=known
            )
        except RevisionConflict:
            log.info("a cursor was moved elsewhere", cursor=place.name, partition=place.partition)
            self._revisions.pop(place, None)
            self._noted.pop(place, None)
            return
        except PenstockError as error:
            log.warning("a cursor was not saved", cursor=place.name, error=error.message)
            return
        if self._noted.get(place) == cursor:
            del self._noted[place]

    async def list(self, topic: int) -> list[dict[str, Any]]:
        """All cursors of a topic, by name and partition."""
        found: dict[tuple[str, int], Cursor] = {}
        for entry in await self._store.range(f"{PREFIX}{topic}/"):
            _, _, name, partition = entry.key.split("/")
            found[name, int(partition)] = msgspec.json.decode(entry.value, type=Cursor)
        for place, cursor in self._noted.items():
            if place.topic == topic:
                found[place.name, place.partition] = cursor
        return [
            {"name": name, "partition": partition, **msgspec.to_builtins(cursor)}
            for (name, partition), cursor in sorted(found.items())
        ]

    async def delete(self, topic: int, name: str) -> int:
        """Forget a cursor in all partitions; in how many there was one."""
        for place in [place for place in self._noted if place[:2] == (topic, name)]:
            del self._noted[place]
        entries = await self._store.range(f"{PREFIX}{topic}/{name}/")
        for entry in entries:
            await self._store.delete(entry.key)
            self._revisions.pop(Place(topic, name, int(entry.key.rpartition("/")[2])), None)
        return len(entries)

    def forget(self, topic: int) -> None:
        """The topic was deleted, and its cursors with it."""
        for known in (self._noted, self._revisions):
            for place in [place for place in known if place.topic == topic]:
                del known[place]
