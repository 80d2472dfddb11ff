"""Every call but the enqueues, once for both listeners: arguments in, the engine's answer out.

Results are maps in the gateway's words; `responses` and the gRPC messages say which of their
fields are sent. The one difference of vocabulary to the engine is that a heap's `name` is `topic`
here, as it is in all arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from penstock.errors import InvalidArgument, LeaseLost, PenstockError
from penstock.model.ids import LeaseToken, MessageId
from penstock.node.observe.logs import get_logger
from penstock.server import answers as tell
from penstock.server import arguments as ask
from penstock.server.pool import GatewayLink

log: Final = get_logger(__name__)
Result = dict[str, Any]
T = TypeVar("T")
READS: Final = frozenset({"Peek", "DlqList"})  # calls whose answers may be large
READS_MAX: Final = 2  # of them at once: an answer that is being made takes many times its size


class GatewayOperation(NamedTuple):
    route: str  # over HTTP: a method, and a path with the names of the arguments that it holds
    request: type[msgspec.Struct]
    response: type[msgspec.Struct]
    run: Callable[[GatewayLink, Any], Awaitable[Result]]
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


async def get_heap(link: GatewayLink, request: ask.OfTopic) -> Result:
    return heap(await link.call("topic_get", topic=request.topic))


async def list_heaps(link: GatewayLink, request: ask.ListingCall) -> Result:
    found = await link.call("topic_list", **given(request))
    return {"heaps": [heap(config) for config in found["topics"]], "next": found.get("next")}


async def update_heap(link: GatewayLink, request: Any) -> Result:
    changes = given(request, "topic")
    if not changes:
        raise InvalidArgument("no attribute to change is given", field="body")
    link.forget(request.topic)
    config = await link.call("topic_update", topic=request.topic, changes=changes)
    link.forget(request.topic)
    return heap(config)


async def delete_heap(link: GatewayLink, request: ask.DeleteHeapCall) -> Result:
    result = await link.call("topic_delete", **given(request))
    link.forget(request.topic)
    return result


async def stats(link: GatewayLink, request: ask.StatsCall) -> Result:
    found = await link.call("stats", **given(request))
    return {"topics": [heap(topic) for topic in found["topics"]], "next": found.get("next")}


async def pop(link: GatewayLink, request: ask.PopCall) -> Result:
    """Wait for messages. A caller that goes away meanwhile gets none: they are given back unused,
    because a lease that nobody knows of would hide its message until it expires."""
    call = asyncio.ensure_future(link.call("pop", **given(request)))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        call.add_done_callback(lambda done: _return_unused(link, request, done))
        raise


def _return_unused(link: GatewayLink, request: ask.PopCall, popped: asyncio.Future[Result]) -> None:
    if not popped.cancelled() and popped.exception() is None:
        return_popped(link, request, popped.result())


def return_popped(link: GatewayLink, request: ask.PopCall, result: Result) -> None:
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


async def ack(link: GatewayLink, request: ask.AckCall) -> Result:
    return _held(await link.connection.settle(request.topic, [_token_of(request)]))


async def ack_batch(link: GatewayLink, request: ask.AckBatchCall) -> Result:
    tokens = request.lease_tokens
    lost = await link.connection.settle(request.topic, [LeaseToken.parse(t) for t in tokens])
    return {"lost": [tokens[i] for i in lost]}


async def nack(link: GatewayLink, request: ask.NackCall) -> Result:
    return _held(await _give_back(link, request, [_token_of(request)]))


async def nack_batch(link: GatewayLink, request: ask.NackBatchCall) -> Result:
    tokens = request.lease_tokens
    lost = await _give_back(link, request, [LeaseToken.parse(t) for t in tokens])
    return {"lost": [tokens[i] for i in lost]}


async def extend(link: GatewayLink, request: ask.ExtendCall) -> Result:
    token = LeaseToken.parse(request.lease_token)
    return _held(await link.connection.extend(request.topic, [token], request.extend_ms))


async def confirm(link: GatewayLink, request: ask.ConfirmCall) -> Result:
    subject = "key_id" if request.method is ask.ConfirmMethod.KEY_REVOKE else "topic"
    other = "topic" if subject == "key_id" else "key_id"
    if getattr(request, subject) is None:
        raise InvalidArgument(f"{request.method} is confirmed for a {subject}", field=subject)
    if getattr(request, other) is not None:
        raise InvalidArgument(f"{request.method} is not confirmed for a {other}", field=other)
    return await link.call(
        "confirm", method=request.method.value, subject=getattr(request, subject)
    )


def _token_of(request: ask.AckCall | ask.NackCall) -> LeaseToken:
    token = LeaseToken.parse(request.lease_token)
    message_id = request.message_id
    if message_id and MessageId.parse(message_id).partition != token.partition:
        raise InvalidArgument("message_id and lease_token disagree", field="message_id")
    return token


async def _give_back(
    link: GatewayLink, request: ask.NackCall | ask.NackBatchCall, tokens: Sequence[LeaseToken]
) -> list[int]:
    return await link.connection.give_back(
        request.topic,
        tokens,
        delay_ms=request.delay_ms,
        reject=request.reject,
        reason=request.reason,
    )


def _held(lost: list[int]) -> Result:
    """What is said about a lease that was there."""
    if lost:
        raise LeaseLost("the lease is over: it expired or was settled")
    return {}


_op = GatewayOperation
OPERATIONS: Final = {
    "MakeHeap": _op("POST /v1/heaps", ask.MakeHeapCall, tell.HeapAnswer, make_heap,
                    "Create a heap"),
    "ListHeaps": _op("GET /v1/heaps", ask.ListingCall, tell.HeapsAnswer, list_heaps,
                     "A page of heaps"),
    "GetHeap": _op("GET /v1/heaps/{topic}", ask.OfTopic, tell.HeapAnswer, get_heap,
                   "A heap's configuration"),
    "UpdateHeapConfig": _op("PATCH /v1/heaps/{topic}", ask.UpdateHeapConfigCall, tell.HeapAnswer,
                            update_heap, "Change a heap while it runs"),
    "DeleteHeap": _op("DELETE /v1/heaps/{topic}", ask.DeleteHeapCall, tell.DoneAnswer, delete_heap,
                      "Delete a heap"),
    "Stats": _op("GET /v1/stats", ask.StatsCall, tell.AllStatsAnswer, stats,
                 "Counts per partition of one heap, or of a page of all"),
    "Pop": _op("POST /v1/pop", ask.PopCall, tell.PoppedAnswer, pop,
               "Lease the best messages, waiting for the first", undo=return_popped),
    "Ack": _op("POST /v1/ack", ask.AckCall, tell.DoneAnswer, ack, "Finish a leased message"),
    "AckBatch": _op("POST /v1/ack:batch", ask.AckBatchCall, tell.SettledAnswer, ack_batch,
                    "Finish many leased messages"),
    "Nack": _op("POST /v1/nack", ask.NackCall, tell.DoneAnswer, nack, "Give a leased message back"),
    "NackBatch": _op("POST /v1/nack:batch", ask.NackBatchCall, tell.SettledAnswer, nack_batch,
                     "Give many back"),
    "Extend": _op("POST /v1/extend", ask.ExtendCall, tell.DoneAnswer, extend,
                  "Let a lease run longer"),
    "Peek": _op("GET /v1/peek", ask.PeekCall, tell.PeekedAnswer, engine_call("peek"),
                "Look at the best messages without a lease"),
    "Purge": _op("POST /v1/purge", ask.PurgeCall, tell.PurgedAnswer, engine_call("purge"),
                 "Drop all ready and delayed messages"),
    "MoveToDLQ": _op("POST /v1/move-to-dlq", ask.MoveToDLQCall, tell.DoneAnswer,
                     engine_call("move_to_dlq"), "Move a message to the dead letters"),
    "DlqList": _op("GET /v1/dlq", ask.DlqListCall, tell.DeadLettersAnswer, engine_call("dlq_list"),
                   "A page of dead letters"),
    "DlqReplay": _op("POST /v1/dlq:replay", ask.DlqReplayCall, tell.ReplayedAnswer,
                     engine_call("dlq_replay"), "Make dead letters ready"),
    "DlqDelete": _op("POST /v1/dlq:delete", ask.DlqDeleteCall, tell.DeletedAnswer,
                     engine_call("dlq_delete"), "Delete dead letters"),
    "Confirm": _op("POST /v1/confirm", ask.ConfirmCall, tell.ConfirmationAnswer, confirm,
                   "A token for one destructive call"),
    "ListKeys": _op("GET /v1/keys", ask.ListingCall, tell.KeysAnswer, engine_call("key_list"),
                    "A page of API keys, without secrets"),
    "CreateKey": _op("POST /v1/keys", ask.CreateKeyCall, tell.NewKeyAnswer,
                     engine_call("key_create"), "Make an API key"),
    "RevokeKey": _op("DELETE /v1/keys/{id}", ask.RevokeKeyCall, tell.DoneAnswer,
                     engine_call("key_revoke"), "Revoke an API key"),
    "Status": _op("GET /v1/status", ask.Nothing, tell.StatusAnswer, engine_call("node_status"),
                  "The node"),
}  # fmt: skip
