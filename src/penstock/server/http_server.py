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

from penstock.errors import (
    STATUS_TABLE,
    InvalidArgument,
    LimitExceeded,
    PenstockError,
    Unavailable,
)
from penstock.node.tls import server_context
from penstock.server.http_app import WHOLE
from penstock.server.options import GatewayOptions

SWEEP_S: Final = 1.0


def send_whole(cycle: RequestResponseCycle, status: int, headers: bytes, content: bytes) -> bool:
    """Send a whole response in one write. False, and nothing sent, if it has to go the long way:
    the general interface sends it in pieces and looks each header over, which costs as much as
    all the rest of a small request."""
    if cycle.flow.write_paused or cycle.scope["method"] == "HEAD" or cycle.response_started:
        return False
    if cycle.disconnected:
        return True
    cycle.response_started = cycle.response_complete = True
    end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
    cycle.transport.write(b"".join((STATUS_LINE[status], headers, end, content)))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True


class BoundedHttp(HttpToolsProtocol):
    """One connection. Headers are counted while they arrive."""

    def __init__(self, *arguments: Any, options: GatewayOptions, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.access_log = False
        self._options = options
        self._in_head = True
        self._head_bytes = 0
        self._begun = 0  # requests
        self.deadline = math.inf  # loop time

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.deadline = self.loop.time() + self._options.head_s
        if len(self.connections) > self._options.connections_max:
            self._refuse(LimitExceeded("too many connections", limit=self._options.connections_max))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        begun = self._begun
        super().data_received(data)
        if self._in_head and self._begun == begun:
            # The chunk in which a head began is left out: it may hold the end of a body.
            self._head_bytes += len(data)
            self._check_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._begun += 1
        self.deadline = self.loop.time() + self._options.head_s

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = len(self.url) + sum([len(n) + len(v) for n, v in self.headers])
        if self._check_head():
            self.deadline = self.loop.time() + self._options.body_s
            super().on_headers_complete()
            self.scope[WHOLE] = partial(send_whole, self.cycle)  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self.deadline = math.inf
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn's, but the sweep ends idle connections."""
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self.deadline = self.loop.time() + self._options.idle_s

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidArgument("this is not HTTP/1.1", field="request"))

    def _check_head(self) -> bool:
        limit = self._options.header_bytes_max
        if self._head_bytes <= limit:
            return True
        self._refuse(
            InvalidArgument(f"the headers are over {limit} bytes", field="headers", limit=limit)
        )
        return False

    def _refuse(self, error: PenstockError) -> None:
        """Answer without the application and end the connection."""
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
    """Listens from `start` to `stop`; `port` is known in between."""

    def __init__(self, app: Callable[..., Any], options: GatewayOptions) -> None:
        self._options = options
        self._config = uvicorn.Config(
            app,
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
        self._config.load()
        tls = self._options.tls
        host, port = self._options.host, self._options.http_port
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._protocol,
                host,
                port,
                ssl=server_context(tls) if tls.cert else None,
                backlog=1024,
            )
        except OSError as error:
            text = error.strerror or error
            raise Unavailable(f"cannot listen on {host}:{port}: {text}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        self._sweep()

    async def stop(self) -> None:
        """Take nothing new, finish what is in progress within bounds, then close."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self._options.drain_s):
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

    def _protocol(self) -> BoundedHttp:
        return BoundedHttp(self._config, self._state, {}, options=self._options)

    def _sweep(self) -> None:
        """Close the connections whose deadline has passed."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._state.connections):
            if isinstance(connection, BoundedHttp) and connection.deadline < now:
                connection.transport.close()
        options = self._options
        interval = min(SWEEP_S, options.head_s / 2, options.body_s / 2, options.idle_s / 2)
        self._sweeping = loop.call_later(interval, self._sweep)
