"""The gRPC listener: the service's calls bound to the gateway's operations, health and reflection.

Handlers are made from the service's descriptor, so a call that the proto file names and nothing
implements fails when the gateway starts, not when somebody makes it.

`Calls` and `AdmittedCall` lead a call from its first byte to its end: who makes it, whether there
is room, what it says. The order is deliberate. Every handler is registered as one that takes a
stream of bytes, so that the library calls it as soon as a call's metadata is there: the key is
checked, and the call gets its place among those in progress, before any message is asked for. Until
then the library lets a caller send no more than a small window. A message that does not come ends
the call.

Everybody may ask for the node's health, in bounds of its own, and takes no place from callers with
a key. A check whose message does not come soon is ended, a connection has a few at a time, and of
watchers, who stay, there are so many: when one more comes, the oldest has to go and may come again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.config import Config, Limits, TlsOptions
from penstock.errors import (
    STATUS_TABLE,
    Backpressure,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    PenstockError,
    Unavailable,
)
from penstock.node.door.budget import SHARE, Account, Budget, Held, Party
from penstock.node.door.doorway import Doorway
from penstock.node.door.tls import server_context
from penstock.node.observe.logs import get_logger, request_id
from penstock.server import operations
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.grpc.front import FrontConnection, GrpcFront
from penstock.server.grpc.messages import (
    PopStream,
    enqueue,
    enqueue_batch,
    fields_of,
    message_of,
    subscribe,
)
from penstock.server.operations import (
    OPERATIONS,
    READS,
    ReadPlaces,
    Result,
    next_request_id,
    retry_after_s,
)
from penstock.server.pool import GatewayLink, Pool
from penstock.server.subscriptions import CallerSubscriptions
from penstock.server.vocabulary import request_of

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]
Bytes = AsyncIterator[bytes]
log: Final = get_logger(__name__)

LOOKS: Final = 4  # for messages that do not come, within the time that they have
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Calls:
    """The calls in progress. Invariant: `_total` is the sum of `_by_party`.

    A party, the connections of one key or a connection without one, may have twice as many calls
    in progress as there are places left. So one alone may have two thirds of them, and however
    many there are, there are places for the next one.
    """

    def __init__(self, pool: Pool, front: GrpcFront, *, limits: Limits) -> None:
        self.pool, self._front, self._within_s = pool, front, limits.frame_s
        self._loop = asyncio.get_running_loop()
        self._by_party: dict[Party, int] = {}
        self._total = 0
        # Calls whose message has not come: whose they are, and until when it has to begin.
        self._expected: dict[asyncio.Task[Any], tuple[FrontConnection, float]] = {}
        self._overdue: set[asyncio.Task[Any]] = set()  # those that were cancelled for it
        self._looking = False

    def connection(self, context: Context) -> FrontConnection:
        found = self._front.named.get(context.peer())
        if found is None:
            raise Unavailable("the connection is gone")
        return found

    def admit(self, connection: FrontConnection, api_key: str | None) -> None:
        """From now on the connection is no stranger's, unless it was lost meanwhile."""
        if connection.name not in self._front.named:
            raise Unavailable("the connection is gone")
        connection.admit(api_key)

    def enter(self, connection: FrontConnection) -> Party:
        """Take one of the places for calls in progress; raises `LimitExceeded` if none is free."""
        party, places = connection.account.party, operations.REQUESTS_MAX
        mine = self._by_party.get(party, 0)
        if mine >= SHARE * (places - self._total):
            raise LimitExceeded("too many calls are in progress", limit=places)
        self._by_party[party] = mine + 1
        self._total += 1
        connection.calls += 1
        return party

    def leave(self, connection: FrontConnection, party: Party) -> None:
        connection.calls -= 1
        self._total -= 1
        self._by_party[party] -= 1
        if not self._by_party[party]:
            del self._by_party[party]

    async def message(self, context: Context, type: type[M], *, connection: FrontConnection) -> M:
        """The next message of a call that has to have one. The front looks after those that are on
        their way; here it is about those that never begin."""
        task = asyncio.current_task()
        assert task is not None, "the library runs each call in a task"
        self._expected[task] = connection, self._loop.time() + self._within_s
        self._look_soon()
        try:
            data = await context.read()
        except asyncio.CancelledError:
            if task not in self._overdue:
                raise
            task.uncancel()
            raise InvalidArgument(
                f"the call's message did not come within {self._within_s:g} s", field="message"
            ) from None
        finally:
            del self._expected[task]
            self._overdue.discard(task)
        if not isinstance(data, bytes):
            raise InvalidArgument("the call has no message", field="message")
        return parsed(data, type)

    def _look_soon(self) -> None:
        """One timer serves all calls: one for each would cost as much as to read its message."""
        if self._expected and not self._looking:
            self._looking = True
            self._loop.call_later(self._within_s / LOOKS, self._look)

    def _look(self) -> None:
        self._looking = False
        now = self._loop.time()
        for task, (connection, until) in self._expected.items():
            if now < until:
                continue
            later = now + self._within_s
            if not connection.receiving:
                self._overdue.add(task)
                task.cancel()
                later = math.inf  # it is told once
            self._expected[task] = connection, later
        self._look_soon()


class AdmittedCall:
    """A call that has one of the places, and a good key, for as long as it is entered."""

    link: GatewayLink

    def __init__(self, calls: Calls, context: Context) -> None:
        self._calls, self._context = calls, context
        self.api_key = identify(context)
        self.connection = calls.connection(context)

    async def __aenter__(self) -> AdmittedCall:
        self._party = self._calls.enter(self.connection)
        try:
            self.link = await self._calls.pool.link(self.api_key)
            self._calls.admit(self.connection, self.api_key)
        except BaseException:
            self._calls.leave(self.connection, self._party)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._calls.leave(self.connection, self._party)

    async def message(self, type: type[M]) -> M:
        return await self._calls.message(self._context, type, connection=self.connection)


def parsed(data: bytes, type: type[M]) -> M:
    try:
        return type.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"this is no {type.__name__}: {error}", field="message") from error


async def parsed_all(requests: Bytes, type: type[M]) -> AsyncIterator[M]:
    async for data in requests:
        yield parsed(data, type)


def answered(run: Callable[[Bytes, Context], Awaitable[Any]]) -> Any:
    async def answer(requests: Bytes, context: Context) -> Any:
        try:
            return await run(requests, context)
        except PenstockError as error:
            return await refuse(context, error)
        except Exception:
            log.exception("call failed", path=str(getattr(context, "_method", "")))
            return await refuse(context, Unavailable("the gateway failed; its log says why"))

    return answer


def identify(context: Context) -> str | None:
    """The call's API key. Its request id, or a new one, is set for the task that serves it."""
    api_key, found = None, ""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization":
            scheme, _, key = _text(value).partition(" ")
            if scheme.lower() == "bearer":
                api_key = key.strip() or None
        elif name == "x-api-key":
            api_key = _text(value) or None
        elif name == "x-request-id":
            found = _text(value)
    request_id.set(found if _REQUEST_ID.fullmatch(found) else next_request_id())
    return api_key


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


async def refuse(context: Context, error: PenstockError) -> Any:
    """End the call with the error's status; what else it says goes into the trailing metadata."""
    code, _ = STATUS_TABLE[error.status]
    trailing = [("penstock-code", error.code), ("x-request-id", request_id.get())]
    trailing += [  # in printable ASCII, for metadata holds nothing else
        (f"penstock-{name.replace('_', '-')}", ascii(str(value))[1:-1])
        for name, value in error.details.items()
    ]
    if isinstance(error, Backpressure):
        trailing.append(("retry-after", str(retry_after_s(error))))
    await context.abort(_CODES[code], error.message, tuple(trailing))


CHECK_S: Final = 5.0  # for the message of a check
PER_CONNECTION_MAX: Final = 4
WATCHERS_MAX: Final = 256
NAME_LENGTH_MAX: Final = 255
HEALTH: Final = health.SERVICE_NAME
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
        return grpc.method_handlers_generic_handler(HEALTH, {"Check": check, "Watch": watch})

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


Run = Callable[[GatewayLink, Any, Context], Awaitable[Message]]

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Penstock"]
LIBRARY_LOGGERS: Final = ("grpc._cython.cygrpc", "asyncio")
WINDOW_BYTES: Final = 64 << 10  # that a call may send before its message is asked for
FRAME_BYTES: Final = 1 << 20
PENDING_MAX: Final = 1 << 20  # calls that the library has read and not handed over yet
COPIES: Final = 2  # of an answer that is not sent yet: ours, and the library's in its own memory
KEEPALIVE_MS: Final = 60_000  # after which a silent client is asked whether it is there
_FAST: Final[dict[str, Run]] = {"Enqueue": enqueue, "EnqueueBatch": enqueue_batch}


class GrpcServer:
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
        self._reads = ReadPlaces()
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
        async def answer(_: Bytes, context: Context) -> Any:
            async with AdmittedCall(self._calls, context) as call:
                with call.link:
                    request = await call.message(type)
                    response = await run(call.link, request, context)
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
            if name not in READS and operation.undo is None:
                return message_of(type, await operation.run(link, arguments))
            account = self._calls.connection(context).account
            if operation.undo is not None:
                await account.acquire(0, Held.ANSWERS)
            async with self._reads.taken(account, name):
                result = await operation.run(link, arguments)
                make = partial(_counted, type, account, context)
                return operation.answered(link, arguments, result, make)

        return run

    async def _pop_stream(self, requests: Bytes, context: Context) -> None:
        async with AdmittedCall(self._calls, context) as call:
            with call.link:
                first = await call.message(pb.PopStreamRequest)
                later = parsed_all(requests, pb.PopStreamRequest)
                await PopStream(call.link, context.write).run(first, later)

    async def _subscribe(self, _: Bytes, context: Context) -> None:
        async with AdmittedCall(self._calls, context) as call:
            request = await call.message(pb.SubscribeRequest)
            await subscribe(
                self._subscriptions, call.api_key, request,
                write=context.write, account=call.connection.account,
            )  # fmt: skip

    def _reflection(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What the service is, for tools; told to those with a key."""
        servicer = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]
            (SERVICE.full_name, HEALTH, reflection.SERVICE_NAME)
        )
        asked = reflection_pb2.ServerReflectionRequest

        async def run(requests: Bytes, context: Context) -> None:
            async with AdmittedCall(self._calls, context):
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
        # Frames of a batch's size: each costs the front and the library as much as a small one.
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        # A compressed message may be a thousand times what has been counted.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    ]


def tls_of(options: TlsOptions) -> ssl.SSLContext | None:
    if options.cert is None:
        return None
    context = server_context(options)
    context.set_alpn_protocols(["h2"])
    return context
