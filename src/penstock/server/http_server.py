"""The HTTP listener: uvicorn's protocol with bounds it does not have, on sockets of our own.

uvicorn parses quickly but accepts headers of any size, sent as slowly as one likes, on any number
of connections. Its server object would also take the process's signals, which belong to the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.errors import STATUS_TABLE, InvalidArgument, LimitExceeded, PenstockError
from penstock.node.tls import server_context
from penstock.server.options import GatewayOptions


class BoundedHttp(HttpToolsProtocol):
    """One connection. Headers are counted while they arrive and must be there in time."""

    def __init__(self, *arguments: Any, options: GatewayOptions, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._options = options
        self._in_head = True
        self._head_bytes = 0
        self._begun = 0  # requests
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._options.connections_max:
            self._refuse(LimitExceeded("too many connections", limit=self._options.connections_max))
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._in_head and self._deadline is None and self._between_requests():
            self._expect_head()
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

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._forget_deadline()
        self._head_bytes = len(self.url) + sum(len(n) + len(v) for n, v in self.headers)
        if self._check_head():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.cycle is not None:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidArgument("this is not HTTP/1.1", field="request"))

    def _between_requests(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and cycle.response_complete

    def _expect_head(self) -> None:
        self._in_head = True
        self._deadline = self.loop.call_later(self._options.head_s, self._head_late)

    def _head_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

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
        self._forget_deadline()
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
            server_header=False,
            date_header=False,
            timeout_keep_alive=max(1, round(options.idle_s)),
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._config.load()
        tls = self._options.tls
        self._server = await asyncio.get_running_loop().create_server(
            self._protocol,
            self._options.host,
            self._options.http_port,
            ssl=server_context(tls) if tls.cert else None,
            backlog=1024,
        )
        self.port = self._server.sockets[0].getsockname()[1]

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
        self._server = None

    def _protocol(self) -> BoundedHttp:
        protocol = BoundedHttp(self._config, self._state, {}, options=self._options)
        protocol.access_log = False
        return protocol
