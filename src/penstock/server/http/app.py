"""The HTTP listener's application: authenticate, read within limits, run the call, answer.

It is written against ASGI itself: a router and request objects would cost more than the enqueue
that they carry. The order is deliberate: without a good key nothing of the body is looked at.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import msgspec

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
from penstock.node.door.budget import READ_BYTES, Held
from penstock.node.door.hosts import HostNames
from penstock.node.observe.logs import get_logger, request_id
from penstock.server import callers
from penstock.server.callers import retry_after_s
from penstock.server.http import events as sse
from penstock.server.http.listener import CALLER, TARGET, WHOLE, BoundedHttp
from penstock.server.http.openapi import document
from penstock.server.http.routes import HttpRoute, routes
from penstock.server.operations import READS, READS_MAX, Result
from penstock.server.pool import GatewayLink, Pool
from penstock.server.subscriptions import CallerSubscriptions

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
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
        self._ids = count(1)
        self._id_prefix = secrets.token_hex(6)
        self._active = 0
        self._reads = asyncio.Semaphore(READS_MAX)
        self._streams: set[asyncio.Future[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        exchange = HttpExchange(scope, receive, send)
        if not exchange.request_id:
            exchange.request_id = f"{self._id_prefix}-{next(self._ids):x}".encode()
        # The id is set for this request alone, which has a task, and so a context, of its own.
        request_id.set(exchange.request_id.decode())
        most = callers.REQUESTS_MAX
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
            if exchange.foreign and scope["method"] == "OPTIONS":
                await exchange.respond(200, JSON, b"{}", *_PREFLIGHT)
            else:
                await self._answer(exchange)
        except Disconnected:
            pass
        except PenstockError as error:
            await exchange.refuse(error)
        except Exception:
            log.exception("request failed", path=scope["path"])
            await exchange.refuse(Unavailable("the gateway failed; its log says why"))
        finally:
            self._active -= 1
            for kind in (Held.BODIES, Held.READS):
                exchange.caller.account.hold(0, kind)

    async def _answer(self, exchange: HttpExchange) -> None:
        scope = exchange.scope
        method, path = scope["method"], scope["path"]
        if method == "GET" and path in ("/healthz", "/readyz", "/openapi.json", "/metrics"):
            await self._answer_plain(path, exchange)
            return
        topic = sse.topic_of(scope["raw_path"]) if method == "GET" else None
        if topic is not None:
            await self._stream(topic, exchange)
            return
        try:
            match = self._routes.find(method, path, scope["raw_path"])
        except NotFound:
            await self._link(exchange)  # what exists is told to those with a key
            raise
        link = await self._link(exchange)
        with link.held():
            route = match.route
            limit = route.body_bytes_max or self._body_bytes_max
            body = await exchange.body(limit if route.in_body else 0)
            request = route.parse(
                parameters=match.parameters, query=scope["query_string"], body=body
            )
            content = await self._content(link, route, request, exchange)
        await exchange.respond(200, JSON, content)

    async def _content(
        self, link: GatewayLink, route: HttpRoute, request: msgspec.Struct, exchange: HttpExchange
    ) -> bytes:
        """The answer to a call. If nobody is left to read it, or there is no room for it, what the
        call has done is undone."""
        operation, gone = route.operation, False
        account = exchange.caller.account

        def encode(result: Result) -> bytes:
            if gone:
                raise Disconnected
            content = route.encode(result)
            account.hold(0, Held.READS)
            account.check(len(content))
            return content

        if route.name in READS:
            await account.acquire(READ_BYTES, Held.READS)
            async with self._reads:
                return encode(await operation.run(link, request))
        work = operation.run(link, request)
        if route.name == "Pop":
            result, gone = await self._while_connected(work, exchange)
        else:
            result = await work
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
        """Send events until the caller goes away or the gateway stops."""
        await self._link(exchange)
        await exchange.body(0)
        request = sse.parse(topic, exchange.scope["query_string"], exchange.last_event_id)
        work = sse.stream(
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
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive, self._send = receive, send
        self.api_key: str | None = None
        self.request_id = b""
        self.last_event_id: str | None = None
        self._length = 0
        self._expects = False  # the caller sends its body only when asked to
        self._read = False  # the whole body is here
        self.caller: BoundedHttp = scope[CALLER]
        self._begun = False  # the head of an endless answer is sent
        self._read_headers(scope["headers"])

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
                self.request_id = value if _REQUEST_ID.fullmatch(value) else b""
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
        if self._length:
            await self.caller.account.acquire(self._length, Held.BODIES)
        event = await self._receive()
        if event["type"] == "http.request" and not event.get("more_body"):
            self._read = True
            whole: bytes = event["body"]
            if len(whole) > limit:
                raise too_large(limit)
            return whole
        joined = bytearray()
        while event["type"] == "http.request":
            joined += event["body"]
            if len(joined) > limit:
                raise too_large(limit)
            if not self._length:  # it comes in chunks, and nobody has said how many
                await self.caller.account.acquire(len(event["body"]), Held.BODIES)
            if not event.get("more_body"):
                self._read = True
                return joined
            event = await self._receive()
        raise Disconnected

    async def _drained(self) -> bool:
        """Read what is left of a refused body and forget it, if it is little: closing a connection
        on unread bytes resets it, and the caller would not see why."""
        left = DRAIN_BYTES_MAX
        if self._expects or self._length > DRAIN_BYTES_MAX:
            return self._read
        try:
            async with asyncio.timeout(DRAIN_S):
                while not self._read and left >= 0:
                    event = await self._receive()
                    left -= len(event.get("body", b""))
                    self._read = not event.get("more_body", False)
        except TimeoutError:
            pass
        return self._read

    async def disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self,
        status: int,
        content_type: bytes,
        content: bytes,
        *extra: tuple[bytes, bytes],
        close: bool = False,
    ) -> None:
        head = _HEAD % (content_type, len(content), self.request_id)
        head += b"".join([b"%b: %b\r\n" % header for header in (*extra, *self._shared)])
        await self.scope[WHOLE](status, head, content, close=close)
        self.caller.on_sent(len(content))

    async def begin_events(self) -> Callable[[bytes], Awaitable[None]]:
        """Answer with a body that has no end yet; what is returned adds to it."""
        named = [(b"content-type", EVENTS), (b"x-request-id", self.request_id)]
        headers = [*named, *_STATIC, *self._shared]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._begun = True

        async def write(content: bytes) -> None:
            await self._send({"type": "http.response.body", "body": content, "more_body": True})
            self.caller.on_sent(len(content))

        return write

    async def end_events(self) -> None:
        if self._begun:
            await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: PenstockError) -> None:
        _, status = STATUS_TABLE[error.status]
        fields = {**error.to_wire(), "request_id": self.request_id.decode()}
        extra: list[tuple[bytes, bytes]] = []
        if isinstance(error, Backpressure):
            extra.append((b"retry-after", b"%d" % retry_after_s(error)))
        if isinstance(error, Unauthenticated):
            extra.append((b"www-authenticate", b"Bearer"))
        content = msgspec.json.encode(fields, enc_hook=str)
        await self.respond(status, JSON, content, *extra, close=not await self._drained())


def too_large(limit: int) -> InvalidArgument:
    return InvalidArgument(f"the body is over {limit} bytes", field="body", limit=limit)
