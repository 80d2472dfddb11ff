"""Every call but the enqueues, once for both listeners: arguments in, the engine's answer out.

Results are maps in the gateway's words; `responses` and the gRPC messages say which of their
fields are sent. The one difference of vocabulary to the engine is that a heap's `name` is `topic`
here, as it is in all arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from penstock.errors import InvalidArgument, LeaseLost, PenstockError
from penstock.model.ids import LeaseToken, MessageId
from penstock.node.logs import get_logger
from penstock.server import requests as ask
from penstock.server import responses as tell
from penstock.server.pool import Link

log: Final = get_logger(__name__)
Result = dict[str, Any]


class Operation(NamedTuple):
    request: type[msgspec.Struct]
    response: type[msgspec.Struct]
    run: Callable[[Link, Any], Awaitable[Result]]
    summary: str


def given(request: msgspec.Struct, *without: str) -> Result:
    """The arguments that were given, for the engine to fill in the others."""
    fields = msgspec.to_builtins(request)
    return {n: v for n, v in fields.items() if v is not None and n not in without}


def heap(config: Result) -> Result:
    return {"topic": config.get("name", ""), **config}


async def make_heap(link: Link, request: Any) -> Result:
    config = {"name": request.topic, **given(request, "topic", "exists_ok")}
    call = link.call("topic_create", config=config, exists_ok=request.exists_ok)
    return heap(await _naming_topic(call))


async def get_heap(link: Link, request: ask.OfTopic) -> Result:
    return heap(await link.call("topic_get", topic=request.topic))


async def list_heaps(link: Link, request: ask.Nothing) -> Result:
    found = await link.call("topic_list")
    return {"heaps": [heap(config) for config in found["topics"]]}


async def update_heap(link: Link, request: Any) -> Result:
    changes = given(request, "topic")
    if not changes:
        raise InvalidArgument("no attribute to change is given", field="body")
    link.forget(request.topic)
    config = await link.call("topic_update", topic=request.topic, changes=changes)
    link.forget(request.topic)
    return heap(config)


async def delete_heap(link: Link, request: ask.DeleteHeap) -> Result:
    result = await link.call("topic_delete", **_confirmed(request))
    link.forget(request.topic)
    return result


async def stats(link: Link, request: ask.Stats) -> Result:
    found = await link.call("stats", **given(request))
    return {"topics": [heap(topic) for topic in found["topics"]]}


async def purge(link: Link, request: ask.Purge) -> Result:
    return await link.call("purge", **_confirmed(request))


async def pop(link: Link, request: ask.Pop) -> Result:
    """Wait for messages. A caller that goes away meanwhile gets none: they are given back unused,
    because a lease that nobody knows of would hide its message until it expires."""
    call = asyncio.ensure_future(link.call("pop", **given(request)))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        call.add_done_callback(lambda done: _return_unused(link, request.topic, done))
        raise


def _return_unused(link: Link, topic: str, popped: asyncio.Future[Result]) -> None:
    if popped.cancelled() or popped.exception() is not None:
        return
    tokens = [LeaseToken.parse(m["lease_token"]) for m in popped.result()["messages"]]
    if tokens:
        returning = asyncio.ensure_future(
            link.connection.give_back(topic, tokens, delay_ms=0, counted=False)
        )
        returning.add_done_callback(_log_failed_return)


def _log_failed_return(done: asyncio.Future[list[int]]) -> None:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, PenstockError):
        log.warning("unused leases were not given back", error=error.to_wire())
    elif error is not None:
        raise error


async def peek(link: Link, request: ask.Peek) -> Result:
    return await link.call("peek", **given(request))


async def ack(link: Link, request: ask.Ack) -> Result:
    token = _token_of(request)
    _held(await link.connection.settle(request.topic, [token]))
    return {}


async def ack_batch(link: Link, request: ask.AckBatch) -> Result:
    tokens = request.lease_tokens
    lost = await link.connection.settle(request.topic, [LeaseToken.parse(t) for t in tokens])
    return {"lost": [tokens[i] for i in lost]}


async def nack(link: Link, request: ask.Nack) -> Result:
    token = _token_of(request)
    _held(await _give_back(link, request, request.topic, [token]))
    return {}


async def nack_batch(link: Link, request: ask.NackBatch) -> Result:
    tokens = request.lease_tokens
    parsed = [LeaseToken.parse(t) for t in tokens]
    lost = await _give_back(link, request, request.topic, parsed)
    return {"lost": [tokens[i] for i in lost]}


async def extend(link: Link, request: ask.Extend) -> Result:
    token = LeaseToken.parse(request.lease_token)
    _held(await link.connection.extend(request.topic, [token], request.extend_ms))
    return {}


async def move_to_dlq(link: Link, request: ask.MoveToDLQ) -> Result:
    return await link.call("move_to_dlq", **given(request))


async def dlq_list(link: Link, request: ask.DlqList) -> Result:
    return await link.call("dlq_list", **given(request))


async def dlq_replay(link: Link, request: ask.DlqReplay) -> Result:
    return await link.call("dlq_replay", **given(request))


async def dlq_delete(link: Link, request: ask.DlqDelete) -> Result:
    return await link.call("dlq_delete", **_confirmed(request))


async def confirm(link: Link, request: ask.Confirm) -> Result:
    subject = "key_id" if request.method is ask.ConfirmMethod.KEY_REVOKE else "topic"
    other = "topic" if subject == "key_id" else "key_id"
    if getattr(request, subject) is None:
        raise InvalidArgument(f"{request.method} is confirmed for a {subject}", field=subject)
    if getattr(request, other) is not None:
        raise InvalidArgument(f"{request.method} is not confirmed for a {other}", field=other)
    return await link.call(
        "confirm", method=request.method.value, subject=getattr(request, subject)
    )


async def create_key(link: Link, request: ask.CreateKey) -> Result:
    return await link.call("key_create", name=request.name)


async def list_keys(link: Link, request: ask.Nothing) -> Result:
    return await link.call("key_list")


async def revoke_key(link: Link, request: ask.RevokeKey) -> Result:
    return await link.call("key_revoke", **_confirmed(request))


async def status(link: Link, request: ask.Nothing) -> Result:
    return await link.call("node_status")


def _confirmed(request: ask.Destructive) -> Result:
    return {"force": False, **given(request)}


def _token_of(request: ask.Ack | ask.Nack) -> LeaseToken:
    token = LeaseToken.parse(request.lease_token)
    message_id = request.message_id
    if message_id and MessageId.parse(message_id).partition != token.partition:
        raise InvalidArgument("message_id and lease_token disagree", field="message_id")
    return token


async def _give_back(
    link: Link, terms: ask.NackTerms, topic: str, tokens: Sequence[LeaseToken]
) -> list[int]:
    return await link.connection.give_back(
        topic, tokens, delay_ms=terms.delay_ms, reject=terms.reject, reason=terms.reason
    )


def _held(lost: list[int]) -> None:
    if lost:
        raise LeaseLost("the lease is over: it expired or was settled")


async def _naming_topic(call: Awaitable[Result]) -> Result:
    """Let a complaint about the engine's `name` name the argument that the caller gave."""
    try:
        return await call
    except InvalidArgument as error:
        if error.field == "name":
            raise InvalidArgument(error.message, field="topic", limit=error.limit) from error
        raise


OPERATIONS: Final[dict[str, Operation]] = {
    "MakeHeap": Operation(ask.MakeHeap, tell.Heap, make_heap, "Create a heap"),
    "GetHeap": Operation(ask.OfTopic, tell.Heap, get_heap, "A heap's configuration"),
    "ListHeaps": Operation(ask.Nothing, tell.Heaps, list_heaps, "All heaps"),
    "UpdateHeapConfig": Operation(
        ask.UpdateHeapConfig, tell.Heap, update_heap, "Change a heap while it runs"
    ),
    "DeleteHeap": Operation(ask.DeleteHeap, tell.Done, delete_heap, "Delete a heap"),
    "Stats": Operation(ask.Stats, tell.AllStats, stats, "Counts of one heap or all, per partition"),
    "Purge": Operation(ask.Purge, tell.Purged, purge, "Drop all ready and delayed messages"),
    "Pop": Operation(ask.Pop, tell.Popped, pop, "Lease the best messages, waiting for the first"),
    "Peek": Operation(ask.Peek, tell.Peeked, peek, "Look at the best messages without a lease"),
    "Ack": Operation(ask.Ack, tell.Done, ack, "Finish a leased message"),
    "AckBatch": Operation(ask.AckBatch, tell.Settled, ack_batch, "Finish many leased messages"),
    "Nack": Operation(ask.Nack, tell.Done, nack, "Give a leased message back"),
    "NackBatch": Operation(ask.NackBatch, tell.Settled, nack_batch, "Give many back"),
    "Extend": Operation(ask.Extend, tell.Done, extend, "Let a lease run longer"),
    "MoveToDLQ": Operation(
        ask.MoveToDLQ, tell.Done, move_to_dlq, "Move a message to the dead letters"
    ),
    "DlqList": Operation(ask.DlqList, tell.DeadLetters, dlq_list, "A page of dead letters"),
    "DlqReplay": Operation(ask.DlqReplay, tell.Replayed, dlq_replay, "Make dead letters ready"),
    "DlqDelete": Operation(ask.DlqDelete, tell.Deleted, dlq_delete, "Delete dead letters"),
    "Confirm": Operation(
        ask.Confirm, tell.Confirmation, confirm, "A token for one destructive call"
    ),
    "CreateKey": Operation(ask.CreateKey, tell.NewKey, create_key, "Make an API key"),
    "ListKeys": Operation(ask.Nothing, tell.Keys, list_keys, "All API keys, without secrets"),
    "RevokeKey": Operation(ask.RevokeKey, tell.Done, revoke_key, "Revoke an API key"),
    "Status": Operation(ask.Nothing, tell.Status, status, "The node"),
}
