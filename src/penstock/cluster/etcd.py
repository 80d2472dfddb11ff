"""The metadata store of a cluster: a part of etcd's keys, under one prefix.

etcd gives what a metadata store promises: a revision per change, compare and swap as a transaction,
ordered watches, durability on a majority. This module adds bounds: a call ends with `Unavailable`
after `connect_s + request_s` at the latest (a read after twice that, where there is a second
member), and a watch goes on by itself once etcd is back. Besides, etcd has leases: keys put under
one vanish when nobody has kept it alive for its time.

There is one connection per endpoint. A call goes to the first that is connected, counted from the
one that answered last; a member that fails or does not answer in time is passed over from then on.
A call that changes something is sent once: when its answer is lost, nobody knows whether it took
effect, and sending it again could tell the caller that it lost against itself. Reads are sent a
second time, to another member.

aetcd brings the messages and stubs of etcd's API. Its own client connects to one member, without
TLS, and resumes no watch, which is why the calls are made here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from penstock.cluster.store import ChangeQueue, MetadataChange, Versioned, check_entry
from penstock.errors import (
    DiskFull,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    RevisionConflict,
    Unavailable,
    Unsupported,
)
from penstock.model.topic import NAME

PREFIX_VERSION: Final = "v1"  # the version of keys and values; another would live beside it
RESUME_S: Final = 0.2  # the pause between attempts to go on with a broken watch
POLL_S: Final = 0.02  # the pause between looks at connections that are being made
CHANNEL_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # also the time that an attempt may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 6_000),  # etcd refuses pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),  # this is the one that counts; its default is a minute
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),  # a range is read as of one moment, in one answer
    ("grpc.use_local_subchannel_pool", 1),  # a closed store's backoff is not inherited
)
# A member that has lost its leader ends streams that say this; others would wait in silence.
REQUIRE_LEADER: Final = (("hasleader", "true"),)
log: Final = logging.getLogger(__name__)


class EtcdOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    connect_s: float = 2.0  # how long a call waits for any member to be connected
    request_s: float = 3.0  # how long it then waits for the answer
    lease_ttl_s: int = 5  # how long a node that vanished counts as alive; etcd's least is 2
    ca: Path | None = None  # certificates to trust instead of the machine's; with it, TLS is used
    certificate: Path | None = None  # shown, with its key, to an etcd that asks for one
    key: Path | None = None


def cluster_prefix(cluster: str) -> str:
    if not NAME.fullmatch(cluster):
        raise InvalidArgument(f"a cluster's name is like {NAME.pattern}", field="cluster")
    return f"/penstock/{PREFIX_VERSION}/{cluster}/"


class EtcdStore:
    """Use it from one event loop. Nothing is sent before the first call."""

    def __init__(
        self, endpoints: Sequence[str], *, prefix: str, options: EtcdOptions | None = None
    ) -> None:
        if not prefix.startswith("/") or not prefix.endswith("/"):
            raise InvalidArgument("a prefix starts and ends with /", field="prefix")
        self.prefix = prefix
        self.options = options or EtcdOptions()
        self._peers = EtcdPeers(endpoints, self.options)
        self._rpc = self._peers.rpc
        self._watches: set[ChangeQueue] = set()

    async def get(self, key: str) -> Versioned | None:
        request = self._rpc.RangeRequest(key=self._full(key))
        answer = await self._peers.call("kv", "Range", request, repeat=True)
        return self._entry(answer.kvs[0]) if answer.kvs else None

    async def range(self, prefix: str) -> list[Versioned]:
        full = self._full(prefix)
        request = self._rpc.RangeRequest(key=full, range_end=prefix_end(full))
        answer = await self._peers.call("kv", "Range", request, repeat=True)
        return [self._entry(kv) for kv in answer.kvs]

    async def put(
        self, key: str, value: bytes, *, expected_revision: int | None = None, lease: int = 0
    ) -> int:
        """As every store; `lease` is one that `grant` gave: the key vanishes with it."""
        check_entry(key, value)
        request = self._rpc.PutRequest(key=self._full(key), value=value, lease=lease)
        change = self._rpc.RequestOp(request_put=request)
        answer = await self._change(key, change, expected=expected_revision)
        return int(answer.header.revision)

    async def delete(self, key: str, *, expected_revision: int | None = None) -> bool:
        request = self._rpc.DeleteRangeRequest(key=self._full(key))
        change = self._rpc.RequestOp(request_delete_range=request)
        answer = await self._change(key, change, expected=expected_revision)
        return bool(answer.responses[0].response_delete_range.deleted)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[MetadataChange]]:
        queue = ChangeQueue(prefix)
        watch = EtcdWatch(self._peers, self.prefix, queue)
        await watch.open()
        self._watches.add(queue)
        pump = asyncio.create_task(watch.run(), name=f"metadata-watch-{prefix}")
        try:
            yield queue
        finally:
            self._watches.discard(queue)
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def grant(self, ttl_s: int) -> int:
        request = self._rpc.LeaseGrantRequest(TTL=ttl_s)
        answer = await self._peers.call("lease", "LeaseGrant", request)
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> bool:
        peer = await self._peers.ready_peer()
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)
        stream = peer.lease.LeaseKeepAlive(
            iter((request,)), timeout=self.options.request_s, metadata=REQUIRE_LEADER
        )
        try:
            with self._peers.calling(peer):
                answer = await stream.read()
        finally:
            stream.cancel()
        if not hasattr(answer, "TTL"):
            raise Unavailable(f"etcd at {peer.endpoint} ended a keep-alive without an answer")
        return bool(answer.TTL > 0)

    async def revoke(self, lease: int) -> None:
        try:
            await self._peers.call("lease", "LeaseRevoke", self._rpc.LeaseRevokeRequest(ID=lease))
        except NotFound:
            return

    async def close(self) -> None:
        """Later calls and open watches get `Unavailable`."""
        for queue in self._watches:
            queue.end(Unavailable("the metadata store is closed"))
        await self._peers.close()

    async def _change(self, key: str, change: Any, *, expected: int | None) -> Any:
        """Make the change if the entry has the expected revision, or whatever it has if none is;
        etcd says 0 of one that is not there, as we do."""
        rpc, full = self._rpc, self._full(key)
        held = [] if expected is None else [
            rpc.Compare(
                key=full, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=expected
            )
        ]  # fmt: skip
        look = rpc.RequestOp(request_range=rpc.RangeRequest(key=full, keys_only=True))
        request = rpc.TxnRequest(compare=held, success=[change], failure=[look])
        answer = await self._peers.call("kv", "Txn", request)
        if not answer.succeeded:
            kvs = answer.responses[0].response_range.kvs
            revision = int(kvs[0].mod_revision) if kvs else 0
            raise RevisionConflict(
                f"{key} is at revision {revision}, not {expected}", key=key, revision=revision
            )
        return answer

    def _full(self, key: str) -> bytes:
        return (self.prefix + key).encode()

    def _entry(self, kv: Any) -> Versioned:
        key = kv.key[len(self.prefix.encode()) :].decode()
        return Versioned(key, kv.value, kv.mod_revision, kv.create_revision)


class EtcdWatch:
    """Feeds `queue` with the changes under its prefix, which in etcd stands behind `base`, and goes
    on after the connection was lost.

    A stream of changes begins right after a revision at which the range was read. When it breaks
    (the member is gone, has no leader, or dropped the history that the stream needs), the range is
    read again and compared with what was reported: each key that differs is reported once, as it is
    now, and the next stream begins after that. So a watcher may be spared steps in between, but
    never the outcome, and never hears of a change twice.
    """

    def __init__(self, peers: EtcdPeers, base: str, queue: ChangeQueue) -> None:
        self._peers = peers
        self._base = len(base.encode())
        self._prefix = (base + queue.prefix).encode()
        self._queue = queue
        self._known: dict[str, int] = {}  # key -> revision, as reported; no deleted keys
        self._revision = 0  # everything up to it was reported
        self._peer: Any = None
        self._stream: Any = None

    async def open(self) -> None:
        """Begin: changes from now on are reported."""
        answer = await self._read(keys_only=True)
        self._known = {self._key(kv): kv.mod_revision for kv in answer.kvs}
        self._revision = answer.header.revision
        await self._begin()

    async def run(self) -> None:
        """Report changes until cancelled, or until the watcher fell behind."""
        broken = False  # a break is logged once, however long it takes
        try:
            while not self._queue.ended:
                try:
                    if self._stream is None:
                        await self._resume()
                        log.info("a watch of the metadata goes on")
                        broken = False
                    self._offer(await self._receive())
                except PenstockError as error:
                    self._drop()
                    if not broken:
                        log.warning("a watch of the metadata is broken: %s", error)
                    broken = True
                    await asyncio.sleep(RESUME_S)
        except Exception as error:  # the end of a task: the watcher is told, whatever it is
            log.exception("a watch of the metadata failed")
            self._queue.end(Unavailable(f"the watch failed: {error}"))
        finally:
            self._drop()

    async def _read(self, *, keys_only: bool) -> Any:
        request = self._peers.rpc.RangeRequest(
            key=self._prefix, range_end=prefix_end(self._prefix), keys_only=keys_only
        )
        return await self._peers.call("kv", "Range", request, repeat=True)

    async def _begin(self) -> None:
        rpc = self._peers.rpc
        create = rpc.WatchCreateRequest(
            key=self._prefix, range_end=prefix_end(self._prefix), start_revision=self._revision + 1
        )
        self._peer = await self._peers.ready_peer()
        self._stream = self._peer.watch.Watch(metadata=REQUIRE_LEADER)
        try:
            async with asyncio.timeout(self._peers.options.request_s):
                answer = await self._receive(after=rpc.WatchRequest(create_request=create))
            if not answer.created:
                raise Unavailable("etcd answered a watch with something else")
            self._offer(answer)
        except TimeoutError as error:
            self._peers.pass_over(self._peer)
            self._drop()
            raise Unavailable(f"etcd at {self._peer.endpoint} opens no watch") from error
        except BaseException:
            self._drop()
            raise

    async def _resume(self) -> None:
        """Report how what is there differs from what was reported, then begin again."""
        answer = await self._read(keys_only=False)
        now = {self._key(kv): kv for kv in answer.kvs}
        if answer.header.revision < self._revision:
            log.error("etcd went back from revision %d: was it restored?", self._revision)
        changed = [kv for key, kv in now.items() if kv.mod_revision != self._known.get(key)]
        for kv in sorted(changed, key=lambda kv: int(kv.mod_revision)):
            self._queue.offer(MetadataChange(self._key(kv), kv.value, kv.mod_revision))
        for key in sorted(self._known.keys() - now.keys()):
            self._queue.offer(MetadataChange(key, None, answer.header.revision))
        self._known = {key: kv.mod_revision for key, kv in now.items()}
        self._revision = answer.header.revision
        await self._begin()

    async def _receive(self, *, after: Any = None) -> Any:
        """The stream's next answer, after a request was sent; its end is an error."""
        try:
            with self._peers.calling(self._peer):
                if after is not None:
                    await self._stream.write(after)
                answer = await self._stream.read()
        except asyncio.InvalidStateError as error:  # it ended while the request was being written
            raise Unavailable("etcd ended the watch") from error
        if not hasattr(answer, "events"):
            raise Unavailable("etcd ended the watch")
        if answer.canceled:
            reason = answer.cancel_reason or f"compacted at {answer.compact_revision}"
            raise Unavailable(f"etcd ended the watch: {reason}")
        return answer

    def _offer(self, answer: Any) -> None:
        for event in answer.events:
            key, revision = self._key(event.kv), event.kv.mod_revision
            if event.type:  # DELETE is 1, PUT is 0
                self._known.pop(key, None)
                self._queue.offer(MetadataChange(key, None, revision))
            else:
                self._known[key] = revision
                self._queue.offer(MetadataChange(key, event.kv.value, revision))
            self._revision = revision

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def _key(self, kv: Any) -> str:
        return str(kv.key[self._base :].decode())


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that start with `prefix`, which is not empty and ends in no 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def etcd_rpc() -> Any:
    """etcd's messages and stubs, which come with an extra."""
    try:
        from aetcd import rpc
    except ImportError as error:
        raise Unsupported("metadata in etcd needs penstock[cluster]") from error
    return rpc


class _Peer:
    def __init__(self, rpc: Any, endpoint: str, channel: Any) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.kv = rpc.KVStub(channel)
        self.lease = rpc.LeaseStub(channel)
        self.watch = rpc.WatchStub(channel)

    def ready(self) -> bool:
        """Whether it is connected; if not, it is being tried from now on."""
        return bool(self.channel.get_state(try_to_connect=True).name == "READY")


class EtcdPeers:
    """Connects on the first call. Use it from one event loop."""

    def __init__(self, endpoints: Sequence[str], options: EtcdOptions) -> None:
        if not endpoints:
            raise InvalidArgument("etcd needs at least one endpoint", field="endpoints")
        self.rpc = etcd_rpc()
        self.options = options
        self._endpoints = [parse_endpoint(endpoint) for endpoint in endpoints]
        self._peers: list[_Peer] = []
        self._first = 0  # the member that a call tries first
        self._closed = False

    async def call(self, service: str, method: str, request: Any, *, repeat: bool = False) -> Any:
        """The answer to one call; `repeat` says that it may be sent again."""
        try:
            return await self._call_once(service, method, request)
        except Unavailable:
            if not repeat or len(self._peers) < 2 or self._closed:
                raise
        return await self._call_once(service, method, request)

    async def _call_once(self, service: str, method: str, request: Any) -> Any:
        peer = await self.ready_peer()
        send = getattr(getattr(peer, service), method)
        with self.calling(peer):
            return await send(request, timeout=self.options.request_s)

    @contextmanager
    def calling(self, peer: _Peer) -> Iterator[None]:
        """Raise our errors for those of gRPC, and pass over a member that is away."""
        try:
            yield
        except self.rpc.AioRpcError as error:
            reason = _translate(error, peer.endpoint)
            if isinstance(reason, Unavailable):
                self.pass_over(peer)
            raise reason from error
        except asyncio.CancelledError as error:
            # gRPC raises the same for a call whose connection was closed as for a cancelled task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable("the connection to etcd was closed") from error

    async def ready_peer(self) -> _Peer:
        """A member that is connected; `Unavailable` if there is none in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.options.connect_s
        while True:
            if self._closed:
                raise Unavailable("the metadata store is closed")
            if not self._peers:
                self._peers = [self._connect(endpoint) for endpoint in self._endpoints]
            for offset in range(len(self._peers)):
                place = (self._first + offset) % len(self._peers)
                if self._peers[place].ready():
                    self._first = place
                    return self._peers[place]
            if loop.time() >= deadline:
                addresses = ", ".join(endpoint.address for endpoint in self._endpoints)
                raise Unavailable(f"etcd cannot be reached at {addresses}")
            await asyncio.sleep(POLL_S)

    def pass_over(self, peer: _Peer) -> None:
        """Begin with the member after this one from now on."""
        if peer in self._peers:
            self._first = (self._peers.index(peer) + 1) % len(self._peers)

    async def close(self) -> None:
        self._closed = True
        peers, self._peers = self._peers, []
        for peer in peers:
            await peer.channel.close()

    def _connect(self, endpoint: Endpoint) -> _Peer:
        address, options = endpoint.address, self.options
        if not endpoint.tls and options.ca is None:
            channel = self.rpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            return _Peer(self.rpc, address, channel)
        import grpc

        credentials = grpc.ssl_channel_credentials(
            root_certificates=options.ca.read_bytes() if options.ca else None,
            private_key=options.key.read_bytes() if options.key else None,
            certificate_chain=options.certificate.read_bytes() if options.certificate else None,
        )
        channel = self.rpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        return _Peer(self.rpc, address, channel)


class Endpoint(NamedTuple):
    address: str  # host:port
    tls: bool


def parse_endpoint(text: str) -> Endpoint:
    """An endpoint is `host:port`, or a URL of that, where https asks for TLS."""
    address = text.removeprefix("http://").removeprefix("https://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise InvalidArgument(f"an etcd endpoint is host:port, not {text}", field="endpoints")
    return Endpoint(address, text.startswith("https://"))


def _translate(error: Any, endpoint: str) -> PenstockError:
    code, text = error.code().name, error.details() or ""
    if code == "NOT_FOUND":
        return NotFound(f"etcd at {endpoint}: {text}")
    if code == "RESOURCE_EXHAUSTED" and "space exceeded" in text:
        return DiskFull(f"etcd at {endpoint}: {text}")
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED") or "user name is empty" in text:
        return FailedPrecondition(f"etcd at {endpoint} does not let us in: {text}")
    if code == "INVALID_ARGUMENT" and "auth" not in text:
        return InvalidArgument(f"etcd at {endpoint}: {text}", field="metadata")
    return Unavailable(f"etcd at {endpoint} does not answer: {code.lower()}: {text}")
