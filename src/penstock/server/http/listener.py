"""The HTTP listener: uvicorn's protocol with bounds it does not have, on sockets of our own.

uvicorn parses quickly but accepts headers of any size, sent as slowly as one likes, on any number
of connections. Its server object would also take the process's signals, which belong to the node.

A connection always has a deadline: for the head of a request, for its body, or for the next
request. One sweep looks at all of them now and then; a timer per request would cost more than
parsing it. While the application works on a whole request there is none.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from penstock.config import Config, Limits
from penstock.errors import STATUS_TABLE, InvalidArgument, LimitExceeded, PenstockError, Unavailable
from penstock.node.door.budget import Budget, Held
from penstock.node.door.doorway import Doorway, address_of
from penstock.node.door.flow import Unread
from penstock.node.door.tls import server_context
from penstock.server import operations
from penstock.server.operations import key_id_of, listen

SWEEP_S: Final = 1.0
PIECE_BYTES: Final = 1024  # parsed at once, unless more of it is known to be a body
REST_BYTES_MAX: Final = 1 << 20  # of requests that wait for the one before
HEADERS_MAX: Final = 128  # of one request
# What a request's scope has beside the keys of ASGI: its target, where that is a whole URL.
TARGET: Final = "penstock.target"


async def send_whole(
    cycle: RequestResponseCycle, status: int, headers: bytes, content: bytes, *, close: bool
) -> None:
    """Send a whole response in one write. The general interface sends it in pieces and looks each
    header over, which costs as much as all the rest of a small request."""
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    if cycle.response_started:  # an answer without an end has failed: no other one can follow
        cycle.transport.close()
        return
    cycle.response_started = cycle.response_complete = True
    cycle.keep_alive = cycle.keep_alive and not close
    end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
    body = b"" if cycle.scope["method"] == "HEAD" else content
    cycle.transport.write(b"".join((STATUS_LINE[status], headers, end, body)))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()


class BoundedHttp(HttpToolsProtocol):
    """One connection. Headers are counted while they arrive, bodies and answers in the budget. A
    chunk is parsed in pieces, and no further than the first request that has to wait for the one
    before it: a chunk may hold thousands."""

    def __init__(
        self, *arguments: Any, limits: Limits, budget: Budget, doorway: Doorway, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.access_log = False
        self._limits = limits
        self._budget, self._doorway = budget, doorway
        self._in_head = True
        self._head_bytes = 0
        self._begun = 0  # requests
        self._body_left = 0  # bytes that are still to come, where the head has said how many
        self._body_bytes = 0  # that are here
        self._body_since = 0.0  # loop time; 0: no body is on its way
        self._rest = b""  # received and not parsed: a request waits for the one before
        self._postponed = False  # the next request, until the answer to the last one is read
        self._admitted = False  # somebody with a good key
        self._key_id: str | None = None
        self.address = ""
        self.account = budget.account(self)
        self._unread = Unread(self.account)
        self._answered = 0.0  # when something was last asked, or answered
        self.deadline = math.inf  # loop time

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answered = self.loop.time()
        self.deadline = self._answered + operations.HEAD_S
        self.address = address_of(transport)
        self._doorway.enter(self)
        if len(self.connections) > self._limits.connections_max:
            self._refuse(LimitExceeded("too many connections", limit=self._limits.connections_max))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._rest = b""
        self._doorway.leave(self)
        self._budget.unwatch(self)
        self._unread.update(0)
        self.account.close()

    # --- who it is ---

    def admit(self, api_key: str | None) -> None:
        """The request's key is good; raises `LimitExceeded` if there is no place for its caller."""
        if not self._admitted:
            self._doorway.admit(self)
            self._admitted = True
        key_id = key_id_of(api_key)
        if key_id != self._key_id:
            self._key_id = key_id
            self.account.join(key_id)

    def idle_s(self) -> float:
        cycle: RequestResponseCycle | None = self.cycle
        busy = cycle is not None and not cycle.response_complete
        return 0.0 if busy else float(self.loop.time()) - self._answered

    def expel(self) -> None:
        self.transport.abort()

    # --- what comes in ---

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._rest:
            self._keep(self._rest + data)
        else:
            self._parse(data)
        if not self._admitted:
            kept = self._head_bytes + self._body_bytes + len(self._rest)
            self._doorway.hold(self, kept)

    def _parse(self, data: bytes) -> None:
        at, end = 0, len(data)
        while at < end:
            if self.transport.is_closing():
                return
            if self.pipeline or self._postponed:
                self._keep(data[at:])
                return
            piece, begun = data[at : at + max(PIECE_BYTES, self._body_left)], self._begun
            super().data_received(piece)
            at += len(piece)
            if self._in_head and self._begun == begun:
                # The piece in which a head began is left out: it may hold the end of a body.
                self._head_bytes += len(piece)
            self._check_head()  # further headers may stand behind a body too

    def _keep(self, rest: bytes) -> None:
        self._rest = rest
        self.deadline = math.inf
        self.flow.pause_reading()
        if len(rest) > REST_BYTES_MAX:
            self.transport.abort()

    def _go_on(self) -> None:
        rest, self._rest = self._rest, b""
        if self._body_since:  # its sender could not go on before
            self._body_since = self.loop.time()
            self.deadline = self._body_since + self._limits.frame_s
        elif self._in_head:
            self.deadline = self.loop.time() + operations.HEAD_S
        if rest and not self.transport.is_closing():
            self._parse(rest)
        if not self._rest and not self.transport.is_closing():
            self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._begun += 1
        self.deadline = self.loop.time() + operations.HEAD_S

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes, self._body_left = len(self.url), 0
        for name, value in self.headers:
            self._head_bytes += len(name) + len(value)
            if name == b"content-length" and value.isdigit():
                self._body_left = int(value)
        if self._check_head() and not self.transport.is_closing():
            self._body_since, self._body_bytes = self.loop.time(), 0
            self.deadline = self._body_since + self._limits.frame_s
            if not self.url.startswith(b"/"):
                self.scope[TARGET] = self.url  # type: ignore[typeddict-unknown-key]
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """The application takes requests as they are: ASGI's events would cost more than a put."""
        task = self.loop.create_task(app(cycle, self))
        self.tasks.add(task)
        task.add_done_callback(partial(self._on_ended, cycle))

    def _on_ended(self, cycle: RequestResponseCycle, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        cycle.on_response = lambda: None  # the cycle and its connection would hold each other
        if not cycle.response_started:
            self._refuse(Unavailable("the gateway stops"))
        elif not cycle.response_complete:
            self.transport.close()

    def on_body(self, body: bytes) -> None:
        if self.transport.is_closing():
            return
        size = len(body)
        self._body_left -= size
        self._body_bytes += size
        wanted_s = self._limits.frame_s + self._body_bytes / self._limits.bytes_per_s_min
        self.deadline = self._body_since + wanted_s
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.deadline = math.inf
        self._body_since = 0.0
        self._body_left = self._body_bytes = 0
        if not self.transport.is_closing():
            super().on_message_complete()

    # --- what goes out ---

    def on_response_complete(self) -> None:
        """As uvicorn's, but the sweep ends idle connections, and the next request waits until the
        answer to this one is read."""
        self._answered = self.loop.time()
        if self.transport.is_closing():
            return
        if self.flow.write_paused:
            self._postponed = True
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self.deadline = self.loop.time() + self._limits.idle_s
        if self._rest:  # perhaps with the body of the request that was begun
            self.loop.call_soon(self._go_on)
        else:
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.update(self.transport.get_write_buffer_size())

    def on_sent(self, size: int) -> None:
        """So much was sent, and is kept as a whole until the last of it is on its way."""
        if self.flow.write_paused:
            self._unread.update(self.transport.get_write_buffer_size(), size)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.update(0)
        if self._postponed:
            self._postponed = False
            self.on_response_complete()

    # --- as the budget's holder ---

    def stuck_s(self) -> float:
        if self._unread.since:
            return time.monotonic() - self._unread.since
        return float(self.loop.time()) - self._body_since if self._body_since else 0.0

    def overdue(self) -> str | None:
        if not self._unread.since or self.transport.is_closing():
            self._budget.unwatch(self)
            return None
        self._unread.update(self.transport.get_write_buffer_size())
        return "unread" if self._unread.overdue(self._limits.write_s) else None

    def evict(self, reason: str) -> None:
        self._unread.update(0)
        self.account.hold(0, Held.BODIES)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidArgument("this is not HTTP/1.1", field="request"))

    def _check_head(self) -> bool:
        limit = self._limits.header_bytes_max
        if self._head_bytes <= limit and len(self.headers) <= HEADERS_MAX:
            return True
        what = f"the headers are over {limit} bytes"
        if self._head_bytes <= limit:
            limit, what = HEADERS_MAX, f"there are over {HEADERS_MAX} headers"
        self._refuse(InvalidArgument(what, field="headers", limit=limit))
        return False

    def _refuse(self, error: PenstockError) -> None:
        _, status = STATUS_TABLE[error.status]
        content = msgspec.json.encode(error.to_wire())
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(head.encode() + content)
            self.transport.close()


class HttpServer:
    def __init__(
        self, app: Callable[..., Any], config: Config, *, budget: Budget, doorway: Doorway
    ) -> None:
        self._config, self._budget, self._doorway = config, budget, doorway
        self._uvicorn = uvicorn.Config(
            app,
            interface="asgi3",
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self.port = 0

    async def start(self) -> None:
        self._uvicorn.load()
        config = self._config
        tls = server_context(config.tls) if config.tls_enabled else None
        connection = partial(
            BoundedHttp, self._uvicorn, self._state, {},
            limits=config.limits, budget=self._budget, doorway=self._doorway,
        )  # fmt: skip
        self._server, self.port = await listen(
            connection,
            host=config.host, port=config.http_port, doorway=self._doorway, tls=tls,
        )  # fmt: skip
        self._sweep()

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self._config.drain_s):
                while self._state.tasks:
                    await asyncio.wait(list(self._state.tasks))
        except TimeoutError:
            for task in list(self._state.tasks):
                task.cancel()
        for connection in list(self._state.connections):
            connection.transport.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._server = None

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._state.connections):
            if isinstance(connection, BoundedHttp) and connection.deadline < now:
                connection.transport.close()
        limits = self._config.limits
        shortest = min(operations.HEAD_S, limits.frame_s, limits.idle_s)
        self._sweeping = loop.call_later(min(SWEEP_S, shortest / 2), self._sweep)
