"""The HTTP listener's application: authenticate, read within limits, run the call, answer.

A framework's router and request objects would cost more than the enqueue that they carry. The
order is deliberate: without a good key nothing of the body is looked at.

A live subscription is answered with Server-Sent Events. Each delta is an event `delta` with a JSON
document. The last one of a batch carries an id, the positions reached; a browser that connects
again sends it back as `Last-Event-ID`, and goes on from there. The first id, the positions behind
which it all begins, comes before any event. The connection's own flow control holds back who reads
slowly.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar, cast
from urllib.parse import unquote

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.client.delta.subscription import Released
from penstock.config import Config, host_port
from penstock.errors import (
    STATUS_TABLE,
    Backpressure,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    PenstockError,
    Unauthenticated,
    Unavailable,
)
from penstock.model.delta import document_of
from penstock.model.plain import plain
from penstock.node.door.budget import Account, Held
from penstock.node.door.doorway import HostNames
from penstock.node.observe.logs import get_logger, request_id
from penstock.server import operations
from penstock.server import vocabulary as say
from penstock.server.http.listener import TARGET, BoundedHttp, send_whole
from penstock.server.http.routes import HttpRoute, document, query_fields, routes
from penstock.server.operations import ReadPlaces, Result, next_request_id, retry_after_s
from penstock.server.pool import GatewayLink, Pool
from penstock.server.subscriptions import CallerSubscriptions, Positions, counted, pieces
from penstock.server.vocabulary import json_headers, request_of

log: Final = get_logger(__name__)

JSON: Final = b"application/json"
DRAIN_BYTES_MAX: Final = 2 << 20
DRAIN_S: Final = 0.2
EVENTS: Final = b"text/event-stream"
METRICS: Final = b"text/plain; version=0.0.4; charset=utf-8"
_STATIC: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_HEAD: Final = b"content-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n" + b"".join(
    b"%b: %b\r\n" % header for header in _STATIC
)
# What a page of another site may send, once it is let in, and read.
_PREFLIGHT: Final = (
    (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE"),
    (
        b"access-control-allow-headers",
        b"authorization, x-api-key, x-request-id, content-type, last-event-id",
    ),
    (b"access-control-max-age", b"600"),
)
_EXPOSED: Final = (b"access-control-expose-headers", b"x-request-id, retry-after")
_AUTHORITY: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Disconnected(Exception):
    """The caller went away; nobody is left to answer."""


class HttpApp:
    """`GET /healthz`, `/readyz` and `/openapi.json` are public, everything else takes a key."""

    def __init__(
        self,
        pool: Pool,
        subscriptions: CallerSubscriptions,
        *,
        config: Config,
        metrics_text: Callable[[], bytes] | None,
    ) -> None:
        self._pool, self._subscriptions = pool, subscriptions
        self._body_bytes_max = config.limits.frame_bytes_max
        self._metrics_text = metrics_text
        self._origins = frozenset(origin.encode() for origin in config.http.cors_origins)
        names = config.http.hosts
        if config.cluster.advertise:  # what the other nodes reach this one at, callers may use too
            host, _ = host_port(config.cluster.advertise, field="cluster.advertise", port=0)
            names = (*names, host)
        self._hosts = HostNames(config.host, names=names)
        self._routes = routes()
        self._document = msgspec.json.encode(document(self._routes.all))
        self._active = 0
        self._reads = ReadPlaces()
        self._streams: set[asyncio.Future[None]] = set()

    async def __call__(self, cycle: RequestResponseCycle, caller: BoundedHttp) -> None:
        exchange = HttpExchange(cycle, caller)
        # The id is set for this request alone, which has a task, and so a context, of its own.
        request_id.set(exchange.request_id)
        most = operations.REQUESTS_MAX
        if self._active >= most:
            await exchange.refuse(LimitExceeded(f"{most} requests are in progress", limit=most))
            return
        self._active += 1
        try:
            exchange.check_addressed(self._hosts)
            if exchange.foreign and exchange.origin not in self._origins:
                raise Unauthenticated("requests of other sites' pages are refused")
            if exchange.foreign:
                exchange.share()
            if exchange.foreign and exchange.scope["method"] == "OPTIONS":
                await exchange.respond(200, JSON, b"{}", *_PREFLIGHT)
            else:
                await self._answer(exchange)
        except Disconnected:
            pass
        except PenstockError as error:
            await exchange.refuse(error)
        except Exception:
            log.exception("request failed", path=exchange.scope["path"])
            await exchange.refuse(Unavailable("the gateway failed; its log says why"))
        finally:
            self._active -= 1
            exchange.caller.account.hold(0, Held.BODIES)

    async def _answer(self, exchange: HttpExchange) -> None:
        scope = exchange.scope
        method, path = scope["method"], scope["path"]
        if method == "GET" and path in ("/healthz", "/readyz", "/openapi.json", "/metrics"):
            await self._answer_plain(path, exchange)
            return
        topic = events_topic(scope["raw_path"]) if method == "GET" else None
        if topic is not None:
            await self._stream(topic, exchange)
            return
        try:
            match = self._routes.find(method, path, scope["raw_path"])
        except NotFound:
            await self._link(exchange)  # what exists is told to those with a key
            raise
        link = await self._link(exchange)
        with link:
            route = match.route
            limit = route.body_bytes_max or self._body_bytes_max
            body = await exchange.body(limit if route.in_body else 0)
            request = route.parse(
                parameters=match.parameters, query=scope["query_string"], body=body
            )
            if route.enqueues:  # what is durable is not refused for the sake of its answer
                content = msgspec.json.encode(await route.operation.run(link, request))
            else:
                content = await self._content(link, route, request, exchange)
        await exchange.respond(200, JSON, content)

    async def _content(
        self, link: GatewayLink, route: HttpRoute, request: msgspec.Struct, exchange: HttpExchange
    ) -> bytes:
        """The answer to a call. If nobody is left to read it, or there is no room for it, what the
        call has done is undone."""
        operation, account = route.operation, exchange.caller.account
        if operation.undo is None:
            async with self._reads.taken(account, route.name):
                content = route.encode(await operation.run(link, request))
            account.check(len(content))
            return content
        result, gone = await self._while_connected(operation.run(link, request), exchange)

        def encode(result: Result) -> bytes:
            if gone:
                raise Disconnected
            content = route.encode(result)
            account.check(len(content))
            return content

        return operation.answered(link, request, result, encode)

    async def _answer_plain(self, path: str, exchange: HttpExchange) -> None:
        if path == "/openapi.json":
            await exchange.respond(200, JSON, self._document)
        elif path == "/healthz":
            await exchange.respond(200, JSON, b'{"status":"ok"}')
        elif path == "/readyz":
            with suppress(Unauthenticated):  # that the engine wants a key is an answer too
                await self._pool.link(None)
            await exchange.respond(200, JSON, b'{"status":"ready"}')
        else:
            await self._link(exchange)
            if self._metrics_text is None:
                raise NotFound("this gateway has no metrics")
            await exchange.respond(200, METRICS, self._metrics_text())

    async def _link(self, exchange: HttpExchange) -> GatewayLink:
        """The connection for the request's key; from now on its caller is no stranger."""
        link = await self._pool.link(exchange.api_key)
        exchange.caller.admit(exchange.api_key)
        return link

    async def _stream(self, topic: str, exchange: HttpExchange) -> None:
        await self._link(exchange)
        await exchange.body(0)
        request = subscribe_call(topic, exchange.scope["query_string"], exchange.last_event_id)
        work = send_events(
            self._subscriptions, exchange.api_key, request,
            begin=exchange.begin_events, account=exchange.caller.account,
        )  # fmt: skip
        streaming = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(exchange.disconnected())
        self._streams.add(streaming)
        try:
            await asyncio.wait((streaming, gone), return_when=asyncio.FIRST_COMPLETED)
            if streaming.done() and not streaming.cancelled():
                streaming.result()
        finally:
            self._streams.discard(streaming)
            gone.cancel()
            streaming.cancel()
            await asyncio.wait((streaming,))
        await exchange.end_events()

    def end_streams(self) -> None:
        """The gateway stops: nobody waits for streams that never end by themselves."""
        for streaming in self._streams:
            streaming.cancel()

    async def _while_connected(
        self, work: Awaitable[Result], exchange: HttpExchange
    ) -> tuple[Result, bool]:
        """What comes of a call that waits, and whether its caller went away in that very moment;
        if it goes away before, the call is cancelled."""
        call = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(exchange.disconnected())
        try:
            await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise Disconnected
            return call.result(), gone.done()
        finally:
            call.cancel()
            gone.cancel()


class HttpExchange:
    def __init__(self, cycle: RequestResponseCycle, caller: BoundedHttp) -> None:
        self._cycle, self.caller = cycle, caller
        self.scope: dict[str, Any] = cast(Any, cycle.scope)
        self.api_key: str | None = None
        self.request_id = ""
        self.last_event_id: str | None = None
        self._length = 0
        self._expects = False  # the caller sends its body only when asked to
        self._read = False  # the whole body is here
        self._begun = False  # the head of an endless answer is sent
        self._read_headers(self.scope["headers"])
        self.request_id = self.request_id or next_request_id()

    def _read_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._host: bytes | None = None
        self._hosts = 0
        self.origin: bytes | None = None
        self._shared: tuple[tuple[bytes, bytes], ...] = ()
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() == b"bearer":
                    self.api_key = key.strip().decode("latin-1") or None
            elif name == b"x-api-key":
                self.api_key = value.decode("latin-1") or None
            elif name == b"x-request-id":
                self.request_id = value.decode() if _REQUEST_ID.fullmatch(value) else ""
            elif name == b"content-length":
                self._length = int(value)
            elif name == b"expect":
                self._expects = True
            elif name == b"host":
                self._host = value
                self._hosts += 1
            elif name == b"origin":
                self.origin = value
            elif name == b"last-event-id":
                self.last_event_id = value.decode("latin-1") or None
        # A browser says which page a request comes from. A foreign page must not reach a gateway
        # that trusts its loopback. A page is the gateway's own if it comes from where the request
        # goes to, which `check_addressed` holds against the names that the gateway has.
        self.foreign = self.origin is not None and self.origin.partition(b"://")[2] != self._host

    def check_addressed(self, names: HostNames) -> None:
        """Raise unless the request is for this gateway, by exactly one name."""
        if self._hosts > 1:
            raise InvalidArgument("a request has one Host header", field="host")
        names.check(self._host)
        target = self.scope.get(TARGET)
        found = None if target is None else _AUTHORITY.match(target)
        if found is not None and found[1].lower() != (self._host or b"").lower():
            raise InvalidArgument("the request's URL and its Host header differ", field="host")

    def share(self) -> None:
        """Let the page that asks read the answer, although it is another site's."""
        allowed = (b"access-control-allow-origin", self.origin or b"")
        self._shared = (allowed, _EXPOSED, (b"vary", b"origin"))

    async def body(self, limit: int) -> bytes | bytearray:
        if self._length > limit:
            raise too_large(limit)
        account = self.caller.account
        if self._length and account.has_room(self._length, Held.BODIES):
            account.take(self._length, Held.BODIES)
        elif self._length:
            await account.acquire(self._length, Held.BODIES)
        joined = bytearray()
        while not self._read:
            piece = await self._piece()
            joined += piece
            if len(joined) > limit:
                raise too_large(limit)
            if piece and not self._length:  # it comes in chunks, and nobody has said how many
                await account.acquire(len(piece), Held.BODIES)
        return joined

    async def _piece(self) -> bytes | bytearray:
        """What has come of the body since; raises `Disconnected` when its caller is gone."""
        cycle = self._cycle
        piece: bytes | bytearray | None = cycle.body
        if cycle.more_body:
            piece = cast(Any, await cycle.receive()).get("body")
        if piece is None or cycle.disconnected:
            raise Disconnected
        self._read = not cycle.more_body
        return piece

    async def _drained(self) -> bool:
        """Read what is left of a refused body and forget it, if it is little: closing a connection
        on unread bytes resets it, and the caller would not see why."""
        left = DRAIN_BYTES_MAX
        if self._expects or self._length > DRAIN_BYTES_MAX:
            return self._read
        with suppress(TimeoutError, Disconnected):
            async with asyncio.timeout(DRAIN_S):
                while not self._read and left >= 0:
                    left -= len(await self._piece())
        return self._read

    async def disconnected(self) -> None:
        while (await self._cycle.receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self,
        status: int,
        content_type: bytes,
        content: bytes,
        *extra: tuple[bytes, bytes],
        close: bool = False,
    ) -> None:
        head = _HEAD % (content_type, len(content), self.request_id.encode())
        for header in (*extra, *self._shared):
            head += b"%b: %b\r\n" % header
        await send_whole(self._cycle, status, head, content, close=close)
        self.caller.on_sent(len(content))

    async def begin_events(self) -> Callable[[bytes], Awaitable[None]]:
        """Answer with a body that has no end yet; what is returned adds to it."""
        named = [(b"content-type", EVENTS), (b"x-request-id", self.request_id.encode())]
        headers = [*named, *_STATIC, *self._shared]
        send: Callable[[Any], Awaitable[None]] = self._cycle.send
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._begun = True

        async def write(content: bytes) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": True})
            self.caller.on_sent(len(content))

        return write

    async def end_events(self) -> None:
        if self._begun:
            await self._cycle.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, error: PenstockError) -> None:
        _, status = STATUS_TABLE[error.status]
        fields = {**error.to_wire(), "request_id": self.request_id}
        extra: list[tuple[bytes, bytes]] = []
        if isinstance(error, Backpressure):
            extra.append((b"retry-after", b"%d" % retry_after_s(error)))
        if isinstance(error, Unauthenticated):
            extra.append((b"www-authenticate", b"Bearer"))
        content = msgspec.json.encode(fields, enc_hook=str)
        await self.respond(status, JSON, content, *extra, close=not await self._drained())


def too_large(limit: int) -> InvalidArgument:
    return InvalidArgument(f"the body is over {limit} bytes", field="body", limit=limit)


EVENTS_PATH: Final = ("/v1/deltas/", "/events")
QUIET_S: Final = 15.0  # without an event a comment is sent, so that nobody between closes it
REFUSED_S: Final = 1.0  # so long the head waits: who is refused by then is told by a status
RETRY_MS: Final = 1000  # after which a browser connects again

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]
_json: Final = msgspec.json.Encoder(enc_hook=str)


def events_topic(raw_path: bytes) -> str | None:
    path = raw_path.decode("ascii", "replace")
    head, tail = EVENTS_PATH
    inside = path[len(head) : -len(tail)]
    if path.startswith(head) and path.endswith(tail) and inside and "/" not in inside:
        return unquote(inside)
    return None


def subscribe_call(topic: str, query: bytes, last_id: str | None) -> say.SubscribeCall:
    fields = query_fields(query, "routes")
    if "topic" in fields:
        raise InvalidArgument("topic is given twice", field="topic")
    if last_id:
        fields["positions"] = last_id
    return request_of({"topic": topic, **fields}, say.SubscribeCall, text=True)


async def send_events(
    subscriptions: CallerSubscriptions,
    api_key: str | None,
    request: say.SubscribeCall,
    *,
    begin: Callable[[], Awaitable[Write]],
    account: Account,
) -> None:
    """Send events until the caller goes away; `begin` answers with the head of the response."""
    async with subscriptions.open(api_key, request) as following:
        try:
            async with asyncio.timeout(REFUSED_S):
                await following.began()
        except TimeoutError:
            pass  # a log is folded, or a partition moves: that takes what it takes
        write = await begin()
        await write(b"retry: %d\n\n" % RETRY_MS)
        try:
            positions = await _waited_for(Positions.of(request, following), write)
            await write(b"id: %b\n\n" % str(positions).encode())
            while True:
                batch = await _waited_for(anext(following), write)
                async with counted(batch, account):
                    async for rows, last in pieces(batch, subscriptions.turns):
                        await write(events_of(rows, positions.after(batch) if last else None))
        except PenstockError as error:
            await write(b"event: end\ndata: %b\n\n" % _json.encode(error.to_wire()))


async def _waited_for(work: Awaitable[T], write: Write) -> T:
    """What comes of it; whoever waits for it hears that the connection is alive."""
    waiting = asyncio.ensure_future(work)
    try:
        while not waiting.done():
            done, _ = await asyncio.wait((waiting,), timeout=QUIET_S)
            if not done:
                await write(b": quiet\n\n")
        return waiting.result()
    finally:
        waiting.cancel()


def events_of(rows: list[Released], reached: str | None) -> bytes:
    """Rows as text; only the end of a batch is a place to come back to."""
    events = [b"event: delta\ndata: %b\n" % _json.encode(event_of(one)) for one in rows]
    end = b"\n" if reached is None else b"id: %b\n\n" % reached.encode()
    return b"\n".join(events) + end


def event_of(released: Released) -> dict[str, Any]:
    place = {
        "partition": released.partition,
        "sequence": released.sequence,
        "position": released.position,
        "ordinal": released.ordinal,
        "log_time_ms": released.time_ms,
        "headers": json_headers(released.headers),
    }
    document = document_of(released.delta)
    if "metadata" in document:
        document["metadata"] = plain(document["metadata"])
    return document | place
