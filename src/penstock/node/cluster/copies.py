"""Copying a replica from another node: its newest snapshot, then its log as it is stored.

The receiver asks for one piece after the other, each when the one before is on its disk, so that it
is never sent more than it can take. It also paces itself: all copies of a node together
take no more than `replication.seed_bytes_per_s`, and few are made at a time, so that each gets on.

A piece that is longer than an answer may be is held at the source and asked for in chunks. What is
held is bounded in number: while there is no room, others are told to come back, for whoever lost
a piece half way would begin anew and take the room of the next. It is bounded in time too, from the
last chunk that was asked for on, because a receiver may have ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any, Final

from penstock.errors import Backpressure, Corruption, NotFound, Unavailable
from penstock.model.batch import Batch, decode_all
from penstock.node.cluster.transport import PeerLink, Peers
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.replica.ports import CopyPace, Key, SeedHead, SeedTarget

CHUNK_BYTES: Final = 1 << 20
HELD_MAX: Final = 8  # pieces at a source
HELD_S_MAX: Final = 60.0
HELD_RETRY_S: Final = 0.5  # until a source without room is asked again
# Copies that a node makes at a time, from whichever sources. At the lowest pace that can be set a
# chunk takes 16 s; with this many the next one is asked for long before its piece is given up.
COPIES_MAX: Final = 2
CALL_S_MAX: Final = 30.0
log = get_logger(__name__)


class SeedServer:
    """The source's end: answers the calls of nodes that copy from here."""

    def __init__(self, hosts: Mapping[Key, Host]) -> None:
        self._hosts = hosts
        self._held: dict[int, tuple[bytes, float]] = {}  # piece -> (bytes, when it was asked for)
        self._reading = 0  # snapshots that are about to be held
        self._numbers = itertools.count(1)

    async def head(self, key: Key) -> dict[str, Any]:
        host = self._host(key)
        self._check_room()  # before it is read: a snapshot may be large
        self._reading += 1
        try:
            head = await host.seed_head()
        finally:
            self._reading -= 1
        fields = head._asdict()
        del fields["snapshot"]
        return {**fields, **self._piece(head.snapshot)}

    async def slice(self, key: Key, *, from_sequence: int, through: int) -> dict[str, Any]:
        batches = await self._host(key).seed_slice(
            from_sequence, through=through, bytes_max=CHUNK_BYTES
        )
        padded = [(b.header, b.body, bytes(-b.size & 7)) for b in batches]
        return self._piece(b"".join(itertools.chain.from_iterable(padded)))

    def chunk(self, piece: int, offset: int) -> dict[str, Any]:
        found = self._held.get(piece)
        if found is None:
            raise NotFound("the piece is not held any more", piece=piece)
        data, _ = found
        self._held[piece] = (data, asyncio.get_running_loop().time())
        if offset + CHUNK_BYTES >= len(data):
            del self._held[piece]
        return {"data": data[offset : offset + CHUNK_BYTES]}

    def _host(self, key: Key) -> Host:
        host = self._hosts.get(key)
        if host is None:
            raise NotFound("no replica of this partition is here", topic=key[0], partition=key[1])
        return host

    def _piece(self, data: bytes) -> dict[str, Any]:
        """What is told of a piece: all of it, or its beginning and where the rest is."""
        if len(data) <= CHUNK_BYTES:
            return {"bytes": len(data), "piece": 0, "data": data}
        self._check_room()
        number = next(self._numbers)
        self._held[number] = (data, asyncio.get_running_loop().time())
        return {"bytes": len(data), "piece": number, "data": data[:CHUNK_BYTES]}

    def _check_room(self) -> None:
        """Raise `Backpressure` unless one more piece can be held."""
        since = asyncio.get_running_loop().time() - HELD_S_MAX
        self._held = {n: held for n, held in self._held.items() if held[1] > since}
        if len(self._held) + self._reading >= HELD_MAX:
            raise Backpressure("others are copying from this node", retry_after_s=HELD_RETRY_S)


class SeedReader:
    """The receiver's end."""

    def __init__(self, peers: Peers, *, bytes_per_s: int) -> None:
        self._peers = peers
        self._pace = CopyPace(bytes_per_s)
        self._turns = asyncio.Semaphore(COPIES_MAX)

    async def fetch(self, source: str, key: Key, into: SeedTarget) -> None:
        async with self._turns:
            await self._copy(source, key, into)

    async def _copy(self, source: str, key: Key, into: SeedTarget) -> None:
        connection = self._peers.live(source)
        if connection is None:
            raise Unavailable(f"node {source} is not connected", node=source)
        place = {"topic": key[0], "partition": key[1]}
        answer = await self._call(connection, "replica_seed", **place)
        snapshot = await self._whole(connection, answer)
        head = SeedHead(**{name: answer[name] for name in _HEAD_FIELDS}, snapshot=snapshot)
        log.info("copying a replica", **place, source=source, first=head.first, bytes=len(snapshot))
        await into.begin(head)
        following, last = head.first, head.through
        while following <= last:
            piece = await self._call(
                connection, "replica_seed_slice", **place, from_sequence=following, through=last
            )
            batches = _batches(await self._whole(connection, piece), following)
            await into.write(batches)
            following = batches[-1].last + 1

    async def _whole(self, connection: PeerLink, answer: dict[str, Any]) -> bytes:
        parts, have = [answer["data"]], len(answer["data"])
        await self._pace.spend(have)
        while have < answer["bytes"]:
            more = await self._call(
                connection, "replica_seed_chunk", piece=answer["piece"], offset=have
            )
            if not more["data"]:
                raise Corruption("a piece of a replica ended early")
            parts.append(more["data"])
            have += len(more["data"])
            await self._pace.spend(len(more["data"]))
        return b"".join(parts)

    async def _call(self, connection: PeerLink, method: str, **arguments: Any) -> dict[str, Any]:
        """One call, made again while the source has no room; it ends with the connection."""
        while True:
            try:
                async with asyncio.timeout(CALL_S_MAX):
                    return await connection.call(method, **arguments)
            except TimeoutError as error:
                raise Unavailable(f"{method} was not answered in {CALL_S_MAX:.0f} s") from error
            except Backpressure as busy:
                await asyncio.sleep(busy.retry_after_s)


_HEAD_FIELDS: Final = tuple(name for name in SeedHead._fields if name != "snapshot")


def _batches(data: bytes, expected: int) -> list[Batch]:
    """The batches of a slice, verified: at least one, and the first covers `expected`."""
    found = decode_all(data)
    if not found or found[0].first > expected or found[0].last < expected:
        raise Corruption(f"a slice of a replica does not begin at {expected}")
    return found
