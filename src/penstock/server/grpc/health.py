"""gRPC's health service, which everybody may ask, in bounds of its own.

Whoever asks takes no place from callers with a key. A check whose message does not come soon is
ended, a connection has a few at a time, and of watchers, who stay, there are so many: when one more
comes, the oldest has to go and may come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2

from penstock.errors import InvalidArgument, LimitExceeded, NotFound, Unavailable
from penstock.server.grpc.calls import Bytes, Calls, Context, answered, identify, parsed
from penstock.server.grpc.front import FrontConnection

CHECK_S: Final = 5.0  # for the message of a check
PER_CONNECTION_MAX: Final = 4
WATCHERS_MAX: Final = 256
NAME_LENGTH_MAX: Final = 255
NAME: Final = health.SERVICE_NAME
Status = health_pb2.HealthCheckResponse


class HealthService:
    """The handlers of the health service. All services that it knows have one status."""

    def __init__(self, calls: Calls, *services: str) -> None:
        self._calls = calls
        self._services = frozenset(("", *services))
        self._serving = True
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers: dict[asyncio.Future[None], None] = {}  # the oldest first
        self._asking: dict[FrontConnection, int] = {}

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        pack = Status.SerializeToString
        check = grpc.stream_unary_rpc_method_handler(answered(self._check), None, pack)
        watch = grpc.stream_stream_rpc_method_handler(answered(self._watch), None, pack)
        return grpc.method_handlers_generic_handler(NAME, {"Check": check, "Watch": watch})

    def stop(self) -> None:
        self._serving = False
        if not self._stopping.done():
            self._stopping.set_result(None)

    @property
    def status(self) -> Any:
        return Status.SERVING if self._serving else Status.NOT_SERVING

    async def _check(self, requests: Bytes, context: Context) -> Any:
        identify(context)
        with self._place(self._calls.connection(context)):
            service = await self._service(requests)
        if service not in self._services:
            raise NotFound(f"no service {service}")
        return Status(status=self.status)

    async def _watch(self, requests: Bytes, context: Context) -> None:
        identify(context)
        with self._place(self._calls.connection(context)):
            service = await self._service(requests)
            if service not in self._services:
                await context.write(Status(status=Status.SERVICE_UNKNOWN))
            else:
                await context.write(Status(status=self.status))
            with self._watcher() as ended:
                await asyncio.wait((ended, self._stopping), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise Unavailable("there are too many who watch; come again")
        await context.write(Status(status=self.status))

    async def _service(self, requests: Bytes) -> str:
        try:
            async with asyncio.timeout(CHECK_S):
                data = await anext(aiter(requests), b"")
        except TimeoutError as error:
            raise InvalidArgument("the message did not come", field="message") from error
        service: str = parsed(data, health_pb2.HealthCheckRequest).service
        if len(service) > NAME_LENGTH_MAX:
            raise InvalidArgument("the name is too long", field="service", limit=NAME_LENGTH_MAX)
        return service

    @contextmanager
    def _place(self, connection: FrontConnection) -> Iterator[None]:
        asking = self._asking.get(connection, 0)
        if asking >= PER_CONNECTION_MAX:
            raise LimitExceeded("too many questions at once", limit=PER_CONNECTION_MAX)
        self._asking[connection] = asking + 1
        try:
            yield
        finally:
            self._asking[connection] -= 1
            if not self._asking[connection]:
                del self._asking[connection]

    @contextmanager
    def _watcher(self) -> Iterator[asyncio.Future[None]]:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if len(self._watchers) >= WATCHERS_MAX:
            oldest = next(iter(self._watchers))
            del self._watchers[oldest]
            oldest.set_result(None)
        self._watchers[ended] = None
        try:
            yield ended
        finally:
            self._watchers.pop(ended, None)
