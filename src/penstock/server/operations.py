"""What both listeners do alike: every call but the enqueues, arguments in, the engine's answer out,
and what they need for those who call.

Results are maps in the gateway's words; `vocabulary` and the gRPC messages say which of their
fields are sent. The one difference of vocabulary to the engine is that a heap's `name` is `topic`
here, as it is in all arguments.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from penstock.errors import Backpressure, InvalidArgument, LeaseLost, PenstockError, Unavailable
from penstock.model.ids import LeaseToken, MessageId
from penstock.node.door.budget import READ_BYTES, Account, Held
from penstock.node.door.doorway import Doorway
from penstock.node.door.tls import TlsLink
from penstock.node.observe.logs import get_logger
from penstock.server import vocabulary as say
from penstock.server.pool import GatewayLink

REQUESTS_MAX: Final = 4096  # calls in progress at one listener
HEAD_S: Final = 10.0  # until a request's headers are there
_numbers: Final = count(1)
_prefix: Final = secrets.token_hex(6)


async def listen(
    connection: Callable[[], asyncio.Protocol],
    *,
    host: str,
    port: int | None,
    doorway: Doorway,
    tls: ssl.SSLContext | None,
) -> tuple[asyncio.Server, int]:
    """Accept callers; returns the real port too, for 0 takes any that is free."""

    def accept() -> asyncio.BaseProtocol:
        return connection() if tls is None else TlsLink(tls, connection, doorway)

    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(accept, host, port, backlog=1024)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return server, int(server.sockets[0].getsockname()[1])


def key_id_of(api_key: str | None) -> str | None:
    """The part of a key that is no secret, by which all connections of its owner are counted."""
    return api_key.split("_")[1] if api_key and api_key.count("_") > 1 else None


def retry_after_s(error: Backpressure) -> int:
    """When to come back, in the whole seconds that a header has."""
    return max(1, math.ceil(error.retry_after_s))


def next_request_id() -> str:
    """For a request that brings none: a random number for each costs more than to count."""
    return f"{_prefix}-{next(_numbers):x}"


log: Final = get_logger(__name__)
Result = dict[str, Any]
T = TypeVar("T")
READS: Final = frozenset({"Peek", "DlqList"})  # calls whose answers may be large
READS_MAX: Final = 2  # of them at once: an answer that is being made takes many times its size


class ReadPlaces:
    """Where one listener makes answers that may be large: few at once, each with room for it."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(READS_MAX)

    @asynccontextmanager
    async def taken(self, account: Account, name: str) -> AsyncIterator[None]:
        """A place, if the call needs one. There is room before the messages are read."""
        if name not in READS:
            yield
            return
        await account.acquire(READ_BYTES, Held.READS)
        try:
            async with self._places:
                yield
        finally:
            account.give_back(READ_BYTES, Held.READS)


class GatewayOperation(NamedTuple):
    route: str  # over HTTP: a method, and a path with the names of the arguments that it holds
    request: type[msgspec.Struct]
    response: type[msgspec.Struct]
    run: Callable[[GatewayLink, Any], Awaitable[Any]]  # most of them give a `Result`
    summary: str
    # Takes back what a call did whose answer cannot be given; None: there is nothing to take back.
    undo: Callable[[GatewayLink, Any, Result], None] | None = None

    def answered(
        self, link: GatewayLink, request: Any, result: Result, make: Callable[[Result], T]
    ) -> T:
        """The answer that `make` makes of a result; if that fails, what was done is undone."""
        try:
            return make(result)
        except BaseException:
            if self.undo is not None:
                self.undo(link, request, result)
            raise


def given(request: msgspec.Struct, *without: str) -> Result:
    """The arguments that were given, for the engine to fill in the others."""
    fields = msgspec.to_builtins(request)
    return {n: v for n, v in fields.items() if v is not None and n not in without}


def engine_call(method: str) -> Callable[[GatewayLink, Any], Awaitable[Result]]:
    """A call for which the engine takes the same arguments, and whose answer it gives."""

    async def run(link: GatewayLink, request: msgspec.Struct) -> Result:
        return await link.call(method, **given(request))

    return run


def heap(config: Result) -> Result:
    return {"topic": config.get("name", ""), **config}


async def make_heap(link: GatewayLink, request: Any) -> Result:
    config = {"name": request.topic, **given(request, "topic", "exists_ok")}
    try:
        return heap(await link.call("topic_create", config=config, exists_ok=request.exists_ok))
    except InvalidArgument as error:
        if error.field == "name":  # which the caller knows as the topic
            raise InvalidArgument(error.message, field="topic", limit=error.limit) from error
        raise


async def get_heap(link: GatewayLink, request: say.OfTopic) -> Result:
    return heap(await link.call("topic_get", topic=request.topic))


def heap_page(method: str, field: str) -> Callable[[GatewayLink, Any], Awaitable[Result]]:
    async def run(link: GatewayLink, request: msgspec.Struct) -> Result:
        found = await link.call(method, **given(request))
        return {field: [heap(one) for one in found["topics"]], "next": found.get("next")}

    return run


async def update_heap(link: GatewayLink, request: Any) -> Result:
    changes = given(request, "topic")
    if not changes:
        raise InvalidArgument("no attribute to change is given", field="body")
    link.forget(request.topic)
    config = await link.call("topic_update", topic=request.topic, changes=changes)
    link.forget(request.topic)
    return heap(config)


async def delete_heap(link: GatewayLink, request: say.DeleteHeapCall) -> Result:
    result = await link.call("topic_delete", **given(request))
    link.forget(request.topic)
    return result


async def pop(link: GatewayLink, request: say.PopCall) -> Result:
    """Wait for messages. A caller that goes away meanwhile gets none: they are given back unused,
    because a lease that nobody knows of would hide its message until it expires."""
    call = asyncio.ensure_future(link.call("pop", **given(request)))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        call.add_done_callback(lambda done: _return_unused(link, request, done))
        raise


def _return_unused(link: GatewayLink, request: say.PopCall, popped: asyncio.Future[Result]) -> None:
    if not popped.cancelled() and popped.exception() is None:
        return_popped(link, request, popped.result())


def return_popped(link: GatewayLink, request: say.PopCall, result: Result) -> None:
    """Give back what was popped for a caller that is not told of it; no attempt is counted."""
    tokens = [LeaseToken.parse(m["lease_token"]) for m in result["messages"]]
    if tokens:
        returning = asyncio.ensure_future(
            link.connection.give_back(request.topic, tokens, delay_ms=0, counted=False)
        )
        returning.add_done_callback(_log_failed_return)


def _log_failed_return(done: asyncio.Future[list[int]]) -> None:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, PenstockError):
        log.warning("unused leases were not given back", error=error.to_wire())
    elif error is not None:
        raise error


async def ack(link: GatewayLink, request: say.AckCall) -> Result:
    return _held(await link.connection.settle(request.topic, [_token_of(request)]))


async def ack_batch(link: GatewayLink, request: say.AckBatchCall) -> Result:
    tokens = request.lease_tokens
    lost = await link.connection.settle(request.topic, [LeaseToken.parse(t) for t in tokens])
    return {"lost": [tokens[i] for i in lost]}


async def nack(link: GatewayLink, request: say.NackCall) -> Result:
    return _held(await _give_back(link, request, [_token_of(request)]))


async def nack_batch(link: GatewayLink, request: say.NackBatchCall) -> Result:
    tokens = request.lease_tokens
    lost = await _give_back(link, request, [LeaseToken.parse(t) for t in tokens])
    return {"lost": [tokens[i] for i in lost]}


async def extend(link: GatewayLink, request: say.ExtendCall) -> Result:
    token = LeaseToken.parse(request.lease_token)
    return _held(await link.connection.extend(request.topic, [token], request.extend_ms))


async def confirm(link: GatewayLink, request: say.ConfirmCall) -> Result:
    subject = "key_id" if request.method is say.ConfirmMethod.KEY_REVOKE else "topic"
    other = "topic" if subject == "key_id" else "key_id"
    if getattr(request, subject) is None:
        raise InvalidArgument(f"{request.method} is confirmed for a {subject}", field=subject)
    if getattr(request, other) is not None:
        raise InvalidArgument(f"{request.method} is not confirmed for a {other}", field=other)
    return await link.call(
        "confirm", method=request.method.value, subject=getattr(request, subject)
    )


def _token_of(request: say.AckCall | say.NackCall) -> LeaseToken:
    token = LeaseToken.parse(request.lease_token)
    message_id = request.message_id
    if message_id and MessageId.parse(message_id).partition != token.partition:
        raise InvalidArgument("message_id and lease_token disagree", field="message_id")
    return token


async def _give_back(
    link: GatewayLink, request: say.NackCall | say.NackBatchCall, tokens: Sequence[LeaseToken]
) -> list[int]:
    return await link.connection.give_back(
        request.topic,
        tokens,
        delay_ms=request.delay_ms,
        reject=request.reject,
        reason=request.reason,
    )


def _held(lost: list[int]) -> Result:
    if lost:
        raise LeaseLost("the lease is over: it expired or was settled")
    return {}


_op = GatewayOperation
OPERATIONS: Final = {
    "MakeHeap": _op("POST /v1/heaps", say.MakeHeapCall, say.HeapAnswer, make_heap,
                    "Create a heap"),
    "ListHeaps": _op("GET /v1/heaps", say.ListingCall, say.HeapsAnswer,
                     heap_page("topic_list", "heaps"), "A page of heaps"),
    "GetHeap": _op("GET /v1/heaps/{topic}", say.OfTopic, say.HeapAnswer, get_heap,
                   "A heap's configuration"),
    "UpdateHeapConfig": _op("PATCH /v1/heaps/{topic}", say.UpdateHeapConfigCall, say.HeapAnswer,
                            update_heap, "Change a heap while it runs"),
    "DeleteHeap": _op("DELETE /v1/heaps/{topic}", say.DeleteHeapCall, say.DoneAnswer, delete_heap,
                      "Delete a heap"),
    "Stats": _op("GET /v1/stats", say.StatsCall, say.AllStatsAnswer, heap_page("stats", "topics"),
                 "Counts per partition of one heap, or of a page of all"),
    "Pop": _op("POST /v1/pop", say.PopCall, say.PoppedAnswer, pop,
               "Lease the best messages, waiting for the first", undo=return_popped),
    "Ack": _op("POST /v1/ack", say.AckCall, say.DoneAnswer, ack, "Finish a leased message"),
    "AckBatch": _op("POST /v1/ack:batch", say.AckBatchCall, say.SettledAnswer, ack_batch,
                    "Finish many leased messages"),
    "Nack": _op("POST /v1/nack", say.NackCall, say.DoneAnswer, nack, "Give a leased message back"),
    "NackBatch": _op("POST /v1/nack:batch", say.NackBatchCall, say.SettledAnswer, nack_batch,
                     "Give many back"),
    "Extend": _op("POST /v1/extend", say.ExtendCall, say.DoneAnswer, extend,
                  "Let a lease run longer"),
    "Peek": _op("GET /v1/peek", say.PeekCall, say.PeekedAnswer, engine_call("peek"),
                "Look at the best messages without a lease"),
    "Purge": _op("POST /v1/purge", say.PurgeCall, say.PurgedAnswer, engine_call("purge"),
                 "Drop all ready and delayed messages"),
    "MoveToDLQ": _op("POST /v1/move-to-dlq", say.MoveToDLQCall, say.DoneAnswer,
                     engine_call("move_to_dlq"), "Move a message to the dead letters"),
    "DlqList": _op("GET /v1/dlq", say.DlqListCall, say.DeadLettersAnswer, engine_call("dlq_list"),
                   "A page of dead letters"),
    "DlqReplay": _op("POST /v1/dlq:replay", say.DlqReplayCall, say.ReplayedAnswer,
                     engine_call("dlq_replay"), "Make dead letters ready"),
    "DlqDelete": _op("POST /v1/dlq:delete", say.DlqDeleteCall, say.DeletedAnswer,
                     engine_call("dlq_delete"), "Delete dead letters"),
    "Confirm": _op("POST /v1/confirm", say.ConfirmCall, say.ConfirmationAnswer, confirm,
                   "A token for one destructive call"),
    "ListKeys": _op("GET /v1/keys", say.ListingCall, say.KeysAnswer, engine_call("key_list"),
                    "A page of API keys, without secrets"),
    "CreateKey": _op("POST /v1/keys", say.CreateKeyCall, say.NewKeyAnswer,
                     engine_call("key_create"), "Make an API key"),
    "RevokeKey": _op("DELETE /v1/keys/{id}", say.RevokeKeyCall, say.DoneAnswer,
                     engine_call("key_revoke"), "Revoke an API key"),
    "Status": _op("GET /v1/status", say.Nothing, say.StatusAnswer, engine_call("node_status"),
                  "The node"),
}  # fmt: skip
