"""Connections to the members of an etcd cluster, and calls that go to one that is up.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from penstock.errors import (
    DiskFull,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    Unavailable,
    Unsupported,
)

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


class EtcdOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    connect_s: float = 2.0  # how long a call waits for any member to be connected
    request_s: float = 3.0  # how long it then waits for the answer
    lease_ttl_s: int = 5  # how long a node that vanished counts as alive; etcd's least is 2
    ca: Path | None = None  # certificates to trust instead of the machine's; with it, TLS is used
    certificate: Path | None = None  # shown, with its key, to an etcd that asks for one
    key: Path | None = None


def etcd_rpc() -> Any:
    """etcd's messages and stubs, which come with an extra."""
    try:
        from aetcd import rpc
    except ImportError as error:
        raise Unsupported("metadata in etcd needs penstock[cluster]") from error
    return rpc


class _Peer:
    """One member: its connection and the calls that can be made over it."""

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
