"""The gRPC listener: the service's calls bound to the gateway's operations, health and reflection.

Handlers are made from the service's descriptor, so a call that the proto file names and nothing
implements fails when the gateway starts, not when somebody makes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.errors import STATUS_TABLE, Backpressure, PenstockError, Unavailable
from penstock.node.logs import get_logger, new_request_id, request_id
from penstock.node.tls import read_pem
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.fields import request_of
from penstock.server.grpc_convert import fields_of, message_of
from penstock.server.grpc_enqueue import enqueue, enqueue_batch
from penstock.server.grpc_stream import PopStream
from penstock.server.grpc_subscribe import subscribe
from penstock.server.operations import OPERATIONS, Operation
from penstock.server.options import GatewayOptions
from penstock.server.pool import Link, Pool

Run = Callable[[Link, Any], Awaitable[Message]]
Context = grpc.aio.ServicerContext[Any, Any]
log: Final = get_logger(__name__)

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Penstock"]
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FAST: Final[dict[str, Run]] = {"Enqueue": enqueue, "EnqueueBatch": enqueue_batch}


class GrpcServer:
    """Listens from `start` to `stop`; `port` is known in between."""

    def __init__(self, pool: Pool, options: GatewayOptions) -> None:
        self._pool = pool
        self._options = options
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self.port = 0

    async def start(self) -> None:
        options = self._options
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", options.body_bytes_max),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", options.header_bytes_max),
                ("grpc.absolute_max_metadata_size", options.header_bytes_max),
                ("grpc.max_connection_idle_ms", round(options.idle_s * 1000)),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=options.requests_max,
        )
        handlers = {method.name: self._handler(method) for method in SERVICE.methods}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self.port = self._bind(server)
        await server.start()
        self._server = server
        for name in ("", SERVICE.full_name):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(self._options.drain_s)
            self._server = None

    def _bind(self, server: grpc.aio.Server) -> int:
        options = self._options
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"{host}:{options.grpc_port}"
        try:
            if options.tls.cert is None:
                return server.add_insecure_port(address)
            pem = read_pem(options.tls)
            credentials = grpc.ssl_server_credentials(
                [(pem.key, pem.cert)],
                root_certificates=pem.ca,
                require_client_auth=options.tls.require_client,
            )
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {address}: {error}") from error

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        if method.name == "PopStream":
            return grpc.stream_stream_rpc_method_handler(
                self._stream(),
                request_deserializer=request.FromString,
                response_serializer=response.SerializeToString,
            )
        if method.name == "Subscribe":
            return grpc.unary_stream_rpc_method_handler(
                self._subscription(),
                request_deserializer=request.FromString,
                response_serializer=response.SerializeToString,
            )
        run = _FAST.get(method.name) or _generic(OPERATIONS[method.name], response)
        return grpc.unary_unary_rpc_method_handler(
            self._unary(run),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )

    def _unary(self, run: Run) -> Any:
        async def answer(request: Any, context: Context) -> Any:
            api_key = identify(context)
            try:
                link = await self._pool.link(api_key)
                with link.held():
                    response = await run(link, request)
            except PenstockError as error:
                return await refuse(context, error)
            except Exception:
                log.exception("call failed")
                return await refuse(context, _failed())
            context.set_trailing_metadata((("x-request-id", request_id.get()),))
            return response

        return answer

    def _stream(self) -> Any:
        async def run(api_key: str | None, requests: Any, context: Context) -> None:
            link = await self._pool.link(api_key)
            with link.held():
                await PopStream(link, context.write).run(requests)

        return _streaming(run)

    def _subscription(self) -> Any:
        async def run(api_key: str | None, request: Any, context: Context) -> None:
            await subscribe(self._pool, api_key, request, write=context.write)

        return _streaming(run)


def _streaming(run: Callable[[str | None, Any, Context], Awaitable[None]]) -> Any:
    """A handler whose answers are written to the context, one after the other."""

    async def answer(request: Any, context: Context) -> None:
        api_key = identify(context)
        try:
            await run(api_key, request, context)
        except PenstockError as error:
            await refuse(context, error)
        except Exception:
            log.exception("stream failed")
            await refuse(context, _failed())

    return answer


def _generic(operation: Operation, response: type[Message]) -> Run:
    async def run(link: Link, request: Message) -> Message:
        arguments = request_of(fields_of(request), operation.request)
        return message_of(response, await operation.run(link, arguments))

    return run


def _failed() -> Unavailable:
    return Unavailable("the gateway failed; its log says why")


def identify(context: Context) -> str | None:
    """The call's API key. Its request id, or a new one, is set for the task that serves it."""
    api_key, found = None, ""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization":
            scheme, _, key = str(value).partition(" ")
            if scheme.lower() == "bearer":
                api_key = key.strip() or None
        elif name == "x-api-key":
            api_key = str(value) or None
        elif name == "x-request-id":
            found = str(value)
    request_id.set(found if _REQUEST_ID.fullmatch(found) else new_request_id())
    return api_key


def _printable(value: object) -> str:
    """Metadata is printable ASCII."""
    return ascii(str(value))[1:-1]


async def refuse(context: Context, error: PenstockError) -> Any:
    """End the call with the error's status; what else it says goes into the trailing metadata."""
    code, _ = STATUS_TABLE[error.status]
    trailing = [("penstock-code", error.code), ("x-request-id", request_id.get())]
    trailing += [
        (f"penstock-{name.replace('_', '-')}", _printable(value))
        for name, value in error.details.items()
    ]
    if isinstance(error, Backpressure):
        trailing.append(("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
    await context.abort(_CODES[code], error.message, tuple(trailing))
