"""Calls over a whole topic: each node does its share for the partitions that it serves.

A share is what a call does for some partitions of a topic that are served here. `fan_out` has every
partition's share done by its coordinator; the call then merges the results. A node that does not
serve one of the partitions it was asked for refuses before it does anything, and then those are
looked up again; if nobody serves one for too long, the call fails as a whole, although shares of
other nodes may have been done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NamedTuple

from penstock.errors import InvalidArgument, PenstockError, Unavailable
from penstock.node.calls.table import (
    Arguments,
    Caller,
    TopicArguments,
    method,
    parse,
)
from penstock.node.engine import Engine
from penstock.node.route.errands import WAIT_S, not_there
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import Topic, check_id
from penstock.wire.frame import FrameType
from penstock.wire.messages import Call, pack

Result = dict[str, Any]
Share = Callable[[Engine, Topic, list[Partition], dict[str, Any]], Awaitable[Result]]


class Registered(NamedTuple):
    run: Share
    arguments: type[Arguments]  # what another node may say
    of_queues: bool  # its topic must be one of messages that are leased


SHARES: Final[dict[str, Registered]] = {}


def shared(
    arguments: type[Arguments] = Arguments, *, of_queues: bool = False
) -> Callable[[Share], Share]:
    """Register a share under its function's name."""

    def register(run: Share) -> Share:
        SHARES[run.__name__] = Registered(run, arguments, of_queues)
        return run

    return register


def the_only(partitions: list[Partition]) -> Partition:
    """The partition of a share that is about one."""
    if len(partitions) != 1:
        raise InvalidArgument("this is about one partition", field="partitions", limit=1)
    return partitions[0]


class ShareArguments(TopicArguments, frozen=True):
    of: str
    partitions: list[int]
    arguments: dict[str, Any]
    topic_id: int = 0  # that the asking node takes the topic to have


@method(ShareArguments)
async def share(engine: Engine, _: Caller, a: ShareArguments) -> dict[str, Any]:
    """Another node asks for our share of a call."""
    found = SHARES.get(a.of)
    if found is None:
        raise InvalidArgument(f"nobody has a share in {a.of}", field="of")
    parse(found.arguments, a.arguments)
    topic = engine.queue(a.topic) if found.of_queues else engine.topic(a.topic)
    check_id(topic, a.topic_id)
    here = [topic.here(index) for index in sorted(set(a.partitions))]
    return await found.run(engine, topic, here, a.arguments)


async def fan_out(
    engine: Engine,
    topic: Topic,
    run: Share,
    *,
    indices: Iterable[int] | None = None,
    in_turn: bool = False,
    **arguments: Any,
) -> list[Result]:
    """The share of every partition (or of those named), done by whoever serves it.

    `in_turn`: one node after the other; otherwise all at once.
    """
    if indices is None and len(topic.local) == len(topic.partitions):
        return [await run(engine, topic, list(topic.local), arguments)]
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    left = sorted(set(range(len(topic.partitions)) if indices is None else indices))
    results: list[Result] = []
    while left:
        done = await _round(engine, topic, run, left, arguments, in_turn=in_turn)
        results += [result for _, result in done]
        served = {index for some, _ in done for index in some}
        left = [index for index in left if index not in served]
        if left:
            if loop.time() >= deadline:
                raise _nobody(topic, left[0])
            await topic.router.changed(topic.key(left[0]))
    return results


async def _round(
    engine: Engine,
    topic: Topic,
    run: Share,
    indices: list[int],
    arguments: dict[str, Any],
    *,
    in_turn: bool,
) -> list[tuple[list[int], Result]]:
    """One attempt; leaves out those that nobody serves."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        if topic.served(index) is not None:
            groups.setdefault("", []).append(index)
        elif node := topic.router.coordinator(topic.key(index)):
            groups.setdefault(node, []).append(index)

    async def one(node: str, some: list[int]) -> tuple[list[int], Result] | None:
        try:
            if not node:
                here = [topic.here(index) for index in some]
                return some, await run(engine, topic, here, arguments)
            return some, await ask_share(topic, node, run, some, arguments)
        except PenstockError as error:
            if not_there(error) or error.details.get("sent") is False:
                return None
            raise

    if in_turn:
        found = [await one(node, some) for node, some in groups.items()]
    else:
        found = await asyncio.gather(*(one(node, some) for node, some in groups.items()))
    return [result for result in found if result is not None]


async def ask_share(
    topic: Topic,
    node: str,
    run: Share,
    indices: Iterable[int] = (),
    arguments: dict[str, Any] | None = None,
) -> Result:
    """The share of one node."""
    peer = topic.router.cluster.live(node)
    if peer is None:
        raise Unavailable(f"node {node} is not connected", sent=False)
    call = Call(
        "share",
        {"topic": topic.config.name, "of": run.__name__, "partitions": list(indices),
         "arguments": arguments or {}, "topic_id": topic.config.id},
    )  # fmt: skip
    result: Result = await peer.ask(FrameType.SUBSCRIBE, dict, pack(call))
    return result


def _nobody(topic: Topic, index: int) -> Unavailable:
    return Unavailable(
        f"nobody serves partition {index} of {topic.config.name} at the moment", partition=index
    )


def merged(results: Iterable[Result], field: str) -> list[Any]:
    """The rows of all results, in the order of their partitions."""
    rows = [row for result in results for row in result[field]]
    return sorted(rows, key=lambda row: row["partition"])
