"""Connections to the other nodes, what the replicas of this node and theirs say over them, and how
a replica is copied.

There is one connection to each node, opened again whenever it is lost. Each node is the client on
its own connections, so between two nodes there are two. What replicas say to each other gathers
until the end of the loop's turn and goes out in one frame per node.

A stream of a log has two ends. The *reading* end is opened by a follower over its own connection;
if there is none, it waits for one, and hears that the other is gone when a connection is refused.
The *sending* end lives in the session that the stream was opened on, and goes with it.

A copy is a replica's newest snapshot, then its log as it is stored. The receiver asks for one piece
after the other, each when the one before is on its disk, so that it is never sent more than it can
take. It also paces itself: all copies of a node together take no more than
`replication.seed_bytes_per_s`, and few are made at a time, so that each gets on.

A piece that is longer than an answer may be is held at the source and asked for in chunks. What is
held is bounded in number: while there is no room, others are told to come back, for whoever lost
a piece half way would begin anew and take the room of the next. It is bounded in time too, from the
last chunk that was asked for on, because a receiver may have ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec

from penstock.cluster.membership import NodeInfo
from penstock.errors import (
    Backpressure,
    Corruption,
    InvalidArgument,
    NotFound,
    PenstockError,
    Unavailable,
)
from penstock.model.batch import Batch, decode_all
from penstock.model.columns import Buffer
from penstock.node.observe.logs import get_logger
from penstock.node.replica.host import Host
from penstock.node.replica.ports import CopyPace, FetchSeed, Key, SeedHead, SeedTarget
from penstock.node.route import PeerPort
from penstock.replication.effects import (
    Ack,
    Append,
    Fence,
    Fenced,
    Follow,
    Followed,
    Letter,
    Probe,
    Probed,
)
from penstock.wire.frame import FrameFlag, FrameType
from penstock.wire.messages import OpenFollow, Told, pack, unpack

KINDS: Final[dict[str, type[Any]]] = {
    "ack": Ack, "fence": Fence, "fenced": Fenced, "probe": Probe, "probed": Probed,
}  # fmt: skip
_NAMES: Final = {kind: name for name, kind in KINDS.items()}
_DECODERS: Final = {name: msgspec.msgpack.Decoder(kind) for name, kind in KINDS.items()}
_FOLLOW: Final = msgspec.msgpack.Decoder(Follow)
_encoder: Final = msgspec.msgpack.Encoder()
_PADDING: Final = bytes(8)
PAUSE_S: Final = 0.05  # after the first failure to connect; doubles
PAUSE_S_MAX: Final = 1.0
TOLD_MAX: Final = 10_000  # messages that gather for one node in a turn; more get lost
ACK_AGAIN_S: Final = 0.05  # until an acknowledgement that says nothing new is sent all the same
CHUNK_BYTES: Final = 1 << 20
HELD_MAX: Final = 8  # pieces at a source
HELD_S_MAX: Final = 60.0
HELD_RETRY_S: Final = 0.5  # until a source without room is asked again
# Copies that a node makes at a time, from whichever sources. At the lowest pace that can be set a
# chunk takes 16 s; with this many the next one is asked for long before its piece is given up.
COPIES_MAX: Final = 2
CALL_S_MAX: Final = 30.0
log = get_logger(__name__)


class PeerLink(PeerPort, Protocol):
    @property
    def node(self) -> str: ...

    async def call(self, method: str, /, **arguments: Any) -> dict[str, Any]: ...

    def tell(self, told: list[Told]) -> None: ...

    async def wait_closed(self) -> None: ...

    def abort(self) -> None: ...


Connect = Callable[[NodeInfo], Awaitable[PeerLink]]


class Peers:
    """Connections by node. A node that is no longer a member is given up once it is lost.
    `on_refused` hears of nodes at whose address nobody listens: they have ended."""

    def __init__(
        self,
        node: str,
        *,
        connect: Connect,
        spawn: Callable[..., object],
        on_connected: Callable[[str], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._node, self._connect, self._spawn = node, connect, spawn
        self._on_connected, self._on_refused = on_connected, on_refused
        self._members: Mapping[str, NodeInfo] = {}
        self._links: dict[str, _Link] = {}
        self._closed = False

    def live(self, node: str) -> PeerLink | None:
        link = self._links.get(node)
        if link is None or link.connection is None or not link.connection.alive:
            return None
        return link.connection

    def knows(self, node: str) -> bool:
        return node in self._links

    def tell(self, node: str, told: Told) -> None:
        """Say something at the end of this turn; it is lost if there is no connection."""
        link = self._links.get(node)
        if link is None or len(link.told) >= TOLD_MAX:
            return
        if not link.told:
            asyncio.get_running_loop().call_soon(self._flush, node)
        link.told.append(told)

    def on_members(self, members: Mapping[str, NodeInfo]) -> None:
        """Connect to those who came; a member at another address is another run of it."""
        self._members = members
        for node, info in members.items():
            if node == self._node or self._closed:
                continue
            link = self._links.get(node)
            if link is None:
                self._links[node] = link = _Link(info)
                self._spawn(self._keep(node, link), name=f"peer-{node}")
                continue
            moved, link.info = _address(link.info) != _address(info), info
            link.retry.set()
            if moved and link.connection is not None:
                link.connection.abort()

    def close(self) -> None:
        self._closed = True
        for link in self._links.values():
            link.retry.set()
            if link.connection is not None:
                link.connection.abort()

    def _flush(self, node: str) -> None:
        link = self._links.get(node)
        if link is None:
            return
        told, link.told = link.told, []
        connection = self.live(node)
        if connection is not None:
            connection.tell(told)

    async def _keep(self, node: str, link: _Link) -> None:
        """Stay connected until the node is neither a member nor reachable."""
        pause_s = 0.0
        try:
            while not self._closed:
                link.retry.clear()
                if await self._connected(node, link):
                    pause_s = 0.0
                    continue
                if node not in self._members:
                    return
                pause_s = min(max(2 * pause_s, PAUSE_S), PAUSE_S_MAX)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await link.retry.wait()
        finally:
            self._links.pop(node, None)

    async def _connected(self, node: str, link: _Link) -> bool:
        """One connection from its opening to its end; False if there was none."""
        try:
            connection = await self._connect(link.info)
        except PenstockError as error:
            log.debug("peer not reached", peer=node, error=error.message)
            if error.details.get("refused"):
                self._on_refused(node)
            return False
        if connection.node != node:  # the address has been given to somebody else
            connection.abort()
            self._on_refused(node)
            return False
        link.connection = connection
        log.info("peer connected", peer=node)
        try:
            self._on_connected(node)
            await connection.wait_closed()
        finally:
            link.connection = None
            connection.abort()
        log.info("peer lost", peer=node)
        return True


class _Link:
    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.connection: PeerLink | None = None
        self.told: list[Told] = []  # in this turn
        self.retry = asyncio.Event()  # something changed: do not wait any longer


def _address(info: NodeInfo) -> tuple[str, int, str]:
    return info.host, info.native_port, info.uuid


class Output(Protocol):
    """A session, as the sending end of a stream uses it."""

    blocked: bool  # its send buffer is full

    def send(self, type: FrameType, number: int, *payload: Buffer, flags: int = 0) -> None: ...


class FollowOutput:
    def __init__(self, output: Output, number: int, *, key: Key, follow: Follow) -> None:
        self.output, self.number, self.key = output, number, key
        self.node, self.stream = follow.node, follow.stream
        self.refused = False  # a slice did not fit the buffer: somebody waits for room


class _Reading:
    def __init__(self, transport: PeerTransport, to: str, *, key: Key, follow: Follow) -> None:
        self.to, self.key, self.follow = to, key, follow
        # The connection that it is open on, and its number there.
        self.opened: tuple[PeerLink, int] | None = None
        self.lost = False  # it was open: whoever wants to go on opens another
        self._transport = transport

    def on_answer(self, payload: memoryview) -> None:
        host = self._transport.host_of(self)
        if host is not None:
            host.on_message(unpack(payload, Followed)[0])

    def on_batch(self, payload: memoryview) -> None:
        host = self._transport.host_of(self)
        if host is not None:
            append, data = unpack(payload, Append)
            host.on_slice(append, decode_all(data))

    def on_end(self, error: PenstockError | None) -> None:
        self.opened, self.lost = None, True
        host = self._transport.host_of(self)
        if host is not None:
            host.on_stream_lost(self.follow.stream)


class PeerTransport:
    """`ports.Transport` over the connections of `Peers` and the sessions of this node."""

    def __init__(
        self, node: str, *, peers: Peers, hosts: Mapping[Key, Host], fetch_seed: FetchSeed
    ) -> None:
        self._node, self._peers, self._hosts = node, peers, hosts
        self.fetch_seed = fetch_seed
        self._readings: dict[Key, _Reading] = {}
        self._sendings: dict[tuple[str, Key], FollowOutput] = {}
        self._acked: dict[Key, tuple[Ack, float]] = {}  # what was said last, and when
        self._loop = asyncio.get_running_loop()

    # --- what hosts ask for ---

    def send(self, to: str, key: Key, message: Letter) -> None:
        if isinstance(message, Followed):
            self._answer(to, key, message)
            return
        if type(message) is Ack and self._said(key, message):
            return
        self._peers.tell(to, Told(*key, _NAMES[type(message)], _encoder.encode(message)))

    def _said(self, key: Key, ack: Ack) -> bool:
        """Whether this very acknowledgement was sent a moment ago, for the batch whose commit the
        stream tells of now. One after a while is a sign of life."""
        now = self._loop.time()
        before = self._acked.get(key)
        if before is not None and before[0] == ack and now - before[1] < ACK_AGAIN_S:
            return True
        self._acked[key] = (ack, now)
        return False

    def open_stream(self, to: str, key: Key, follow: Follow) -> None:
        self.close_stream(key)
        reading = self._readings[key] = _Reading(self, to, key=key, follow=follow)
        if not self._peers.knows(to):
            asyncio.get_running_loop().call_soon(reading.on_end, None)
            return
        self._open(reading)

    def close_stream(self, key: Key) -> None:
        reading = self._readings.pop(key, None)
        if reading is not None and reading.opened is not None:
            connection, number = reading.opened
            connection.close_stream(number)

    def send_slice(self, to: str, key: Key, append: Append, batches: list[Batch]) -> bool:
        sending = self._sendings.get((to, key))
        if sending is None or sending.stream != append.stream:
            return False
        if sending.output.blocked:
            sending.refused = True
            return False
        payload: list[Buffer] = [pack(append)]
        for batch in batches:
            payload += [batch.header, batch.body, _PADDING[: -batch.size & 7]]
        sending.output.send(FrameType.BATCH, sending.number, *payload, flags=FrameFlag.BATCHED)
        return True

    # --- what connections tell ---

    def on_connected(self, node: str) -> None:
        for reading in list(self._readings.values()):
            if reading.to == node and reading.opened is None and not reading.lost:
                self._open(reading)

    def on_refused(self, node: str) -> None:
        for reading in list(self._readings.values()):
            if reading.to == node and reading.opened is None:
                host = self.host_of(reading)
                if host is not None:
                    host.on_stream_lost(reading.follow.stream, gone=True)

    def host_of(self, reading: _Reading) -> Host | None:
        """The host that a reading end is for, unless it has another stream by now."""
        if self._readings.get(reading.key) is not reading:
            return None
        return self._hosts.get(reading.key)

    def _open(self, reading: _Reading) -> None:
        connection = self._peers.live(reading.to)
        if connection is not None:
            try:
                control = OpenFollow(*reading.key, _encoder.encode(reading.follow))
                reading.opened = connection, connection.open(control, reading)
            except Unavailable:
                return  # it was lost in this very turn; the next connection opens the stream

    # --- what sessions bring ---

    def on_told(self, told: list[Told]) -> None:
        for each in told:
            decoder = _DECODERS.get(each.kind)
            host = self._hosts.get((each.topic, each.partition))
            if decoder is None or host is None:
                continue  # of a later version, or of a partition that is not here any more
            host.on_message(_decoded(decoder, each.message, field="told"))

    def on_open(self, output: Output, number: int, control: OpenFollow) -> FollowOutput:
        """Another node asks for a log; the answer is a `Followed`, at once or later."""
        follow: Follow = _decoded(_FOLLOW, control.follow, field="follow")
        key = (control.topic, control.partition)
        sending = FollowOutput(output, number, key=key, follow=follow)
        before = self._sendings.get((follow.node, key))
        self._sendings[follow.node, key] = sending
        host = self._hosts.get(key)
        if before is not None and host is not None:
            host.on_follower_lost(before.node, before.stream)
        if host is None:
            refused = Followed(self._node, 0, follow.stream, 0, 0, refused=True)
            self._answer(follow.node, key, refused)
        else:
            host.on_follow(follow)
        return sending

    def on_closed(self, sending: FollowOutput) -> None:
        if self._sendings.get((sending.node, sending.key)) is sending:
            del self._sendings[sending.node, sending.key]
            host = self._hosts.get(sending.key)
            if host is not None:
                host.on_follower_lost(sending.node, sending.stream)

    def on_writable(self, sending: FollowOutput) -> None:
        if sending.refused:
            sending.refused = False
            host = self._hosts.get(sending.key)
            if host is not None:
                host.on_writable(sending.node)

    def _answer(self, to: str, key: Key, reply: Followed) -> None:
        sending = self._sendings.get((to, key))
        if sending is not None and sending.stream == reply.stream:
            sending.output.send(FrameType.ACK, sending.number, pack(reply))


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes, *, field: str) -> Any:
    """A message between replicas; raises `InvalidArgument` if it is none."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"malformed {field}: {error}", field=field) from error


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
