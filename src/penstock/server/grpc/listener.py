"""The gRPC listener: the service's calls bound to the gateway's operations, health and reflection.

Handlers are made from the service's descriptor, so a call that the proto file names and nothing
implements fails when the gateway starts, not when somebody makes it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.config import Config, Limits, TlsOptions
from penstock.errors import Unavailable
from penstock.node.door.budget import READ_BYTES, Account, Budget, Held
from penstock.node.door.doorway import Doorway
from penstock.node.door.tls import server_context
from penstock.node.observe.logs import request_id
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.arguments import request_of
from penstock.server.grpc.calls import Bytes, Calls, Context, answered, parsed_all
from penstock.server.grpc.front import GrpcFront
from penstock.server.grpc.health import NAME as HEALTH
from penstock.server.grpc.health import HealthService
from penstock.server.grpc.messages import enqueue, enqueue_batch, fields_of, message_of
from penstock.server.grpc.streams import PopStream, subscribe
from penstock.server.operations import OPERATIONS, READS, READS_MAX, Result
from penstock.server.pool import GatewayLink, Pool
from penstock.server.subscriptions import CallerSubscriptions

Run = Callable[[GatewayLink, Any, Context], Awaitable[Message]]

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Penstock"]
LIBRARY_LOGGERS: Final = ("grpc._cython.cygrpc", "asyncio")
WINDOW_BYTES: Final = 64 << 10  # that a call may send before its message is asked for
PENDING_MAX: Final = 1 << 20  # calls that the library has read and not handed over yet
COPIES: Final = 2  # of an answer that is not sent yet: ours, and the library's in its own memory
KEEPALIVE_MS: Final = 60_000  # after which a silent client is asked whether it is there
_FAST: Final[dict[str, Run]] = {"Enqueue": enqueue, "EnqueueBatch": enqueue_batch}


class GrpcServer:
    """Listens from `start` to `stop`; `port` is known in between."""

    def __init__(
        self,
        pool: Pool,
        subscriptions: CallerSubscriptions,
        *,
        config: Config,
        budget: Budget,
        doorway: Doorway,
    ) -> None:
        self._pool, self._subscriptions, self._config = pool, subscriptions, config
        self._budget, self._doorway = budget, doorway
        self._reads = asyncio.Semaphore(READS_MAX)
        self._server: grpc.aio.Server | None = None
        self._front: GrpcFront | None = None
        self.port = 0

    async def start(self) -> None:
        config = self._config
        front = GrpcFront(config, budget=self._budget, doorway=self._doorway)
        self._front, self._calls = front, Calls(self._pool, front, limits=config.limits)
        self._health = HealthService(self._calls, SERVICE.full_name)
        for name in LIBRARY_LOGGERS:
            logging.getLogger(name).addFilter(is_no_callers_mistake)
        server = grpc.aio.server(options=library_options(config.limits))
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE.full_name, {m.name: self._handler(m) for m in SERVICE.methods}
                ),
                self._health.handler(),
                self._reflection(),
            )
        )
        try:
            server.add_insecure_port(f"unix:{front.path}")
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {front.path}: {error}") from error
        await server.start()
        self._server = server
        await front.start(tls_of(config.tls))
        self.port = front.port

    async def stop(self) -> None:
        if self._front is not None:
            self._front.close()
        if self._server is not None:
            self._health.stop()
            await self._server.stop(self._config.drain_s)
            self._server = None
        if self._front is not None:
            self._front.stop()
            self._front = None

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        pack = response.SerializeToString
        if method.name == "PopStream":
            return grpc.stream_stream_rpc_method_handler(answered(self._pop_stream), None, pack)
        if method.name == "Subscribe":
            return grpc.stream_stream_rpc_method_handler(answered(self._subscribe), None, pack)
        call = self._unary(
            _FAST.get(method.name) or self._translated(method.name, response), request
        )
        return grpc.stream_unary_rpc_method_handler(answered(call), None, pack)

    def _unary(self, run: Run, type: type[Message]) -> Any:
        async def answer(requests: Bytes, context: Context) -> Any:
            async with self._calls.admitted(context) as caller:
                with caller.link.held():
                    message = self._calls.message
                    request = await message(requests, type, connection=caller.connection)
                    response = await run(caller.link, request, context)
            context.set_trailing_metadata((("x-request-id", request_id.get()),))
            return response

        return answer

    def _translated(self, name: str, type: type[Message]) -> Run:
        """A call of the table. One that is answered with messages that are there finds room before
        they are read, and few such answers are made at once. A pop may wait for long, so that room
        for its answer is looked for at the end; if there is none, it is undone."""
        operation = OPERATIONS[name]

        async def run(link: GatewayLink, request: Message, context: Context) -> Message:
            arguments = request_of(fields_of(request), operation.request)
            make: Callable[[Result], Message] = partial(message_of, type)
            async with AsyncExitStack() as stack:
                if name in READS or operation.undo is not None:
                    account = self._calls.connection(context).account
                    make = partial(_counted, type, account, context)
                    taken = (READ_BYTES, Held.READS) if name in READS else (0, Held.ANSWERS)
                    await account.acquire(*taken)
                    stack.callback(account.give_back, *taken)
                if name in READS:
                    await stack.enter_async_context(self._reads)
                result = await operation.run(link, arguments)
                return operation.answered(link, arguments, result, make)

        return run

    async def _pop_stream(self, requests: Bytes, context: Context) -> None:
        async with self._calls.admitted(context) as caller:
            with caller.link.held():
                first = await self._calls.message(
                    requests, pb.PopStreamRequest, connection=caller.connection
                )
                later = parsed_all(requests, pb.PopStreamRequest)
                await PopStream(caller.link, context.write).run(first, later)

    async def _subscribe(self, requests: Bytes, context: Context) -> None:
        async with self._calls.admitted(context) as caller:
            request = await self._calls.message(
                requests, pb.SubscribeRequest, connection=caller.connection
            )
            await subscribe(
                self._subscriptions, caller.api_key, request,
                write=context.write, account=caller.connection.account,
            )  # fmt: skip

    def _reflection(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What the service is, for tools; told to those with a key."""
        servicer = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]
            (SERVICE.full_name, HEALTH, reflection.SERVICE_NAME)
        )
        asked = reflection_pb2.ServerReflectionRequest

        async def run(requests: Bytes, context: Context) -> None:
            async with self._calls.admitted(context):
                questions = parsed_all(requests, asked)
                async for response in servicer.ServerReflectionInfo(questions, context):
                    await context.write(response)

        handler = grpc.stream_stream_rpc_method_handler(
            answered(run), None, reflection_pb2.ServerReflectionResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(
            reflection.SERVICE_NAME, {"ServerReflectionInfo": handler}
        )


def _counted(type: type[Message], account: Account, context: Context, result: Result) -> Message:
    """The answer, which counts until it is sent; raises `Backpressure` if there is no room."""
    response = message_of(type, result)
    size = COPIES * response.ByteSize()
    account.check(size)
    account.take(size, Held.ANSWERS)
    sent: Any = lambda _: account.give_back(size, Held.ANSWERS)  # noqa: E731
    context.add_done_callback(sent)
    return response


def is_no_callers_mistake(record: logging.LogRecord) -> bool:
    """Whether a line is for the node's log. The library writes a traceback for metadata that is not
    UTF-8, as often as somebody sends it, and takes it for Latin-1 then; the task in which it would
    serve a call whose path is not UTF-8 ends by an error that only the loop hears of."""
    error = record.exc_info[1] if record.exc_info else None
    of_library = "coroutine without __name__" in str(record.msg)
    if isinstance(error, UnicodeDecodeError) and of_library:
        return False
    return not str(record.msg).startswith("Invalid encoding")


def library_options(limits: Limits) -> list[tuple[str, int]]:
    """What the library is told. It counts nothing that all connections do together."""
    return [
        ("grpc.max_receive_message_length", limits.frame_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.header_bytes_max),
        ("grpc.absolute_max_metadata_size", limits.header_bytes_max),
        ("grpc.max_connection_idle_ms", round(limits.idle_s * 1000)),
        ("grpc.max_concurrent_streams", limits.streams_max),
        ("grpc.max_allowed_incoming_connections", limits.connections_max),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        # Past these, the library drops calls of anybody: places are given out by `Calls`.
        ("grpc.server.max_pending_requests", PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # A call's window stays small until its message is asked for, however fast its sender is.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # A compressed message may be a thousand times what has been counted.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def tls_of(options: TlsOptions) -> ssl.SSLContext | None:
    if options.cert is None:
        return None
    context = server_context(options)
    context.set_alpn_protocols(["h2"])
    return context
