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

import msgspec

from penstock.errors import InvalidArgument, PenstockError, Unavailable
from penstock.node.calls.table import Arguments, Caller, Result, TopicArguments, method, parse
from penstock.node.engine import Engine
from penstock.node.route.router import WAIT_S, not_there
from penstock.node.serve.partition import Partition
from penstock.node.serve.topic import ServedTopic, check_id
from penstock.wire.frame import FrameType
from penstock.wire.messages import Call, pack

NO_ARGUMENTS: Final = Arguments()


class NodeShare(NamedTuple):
    engine: Engine
    topic: ServedTopic
    partitions: list[Partition]  # all of them are served here
    arguments: Any = NO_ARGUMENTS  # of the type that the share is registered with

    def the_only(self) -> Partition:
        """The partition of a share that is about one."""
        if len(self.partitions) != 1:
            raise InvalidArgument("this is about one partition", field="partitions", limit=1)
        return self.partitions[0]

    async def all_committed(self) -> None:
        """Wait until all that was seen is committed: nothing is shown that could still be lost."""
        self.topic.wake()
        await asyncio.gather(*(p.journal.committed(p.log.sequence_last) for p in self.partitions))


Run = Callable[[NodeShare], Awaitable[Result]]


class Registered(NamedTuple):
    run: Run
    arguments: type[Arguments]  # what another node may say
    of_queues: bool  # its topic must be one of messages that are leased


SHARES: Final[dict[str, Registered]] = {}


def shared(
    arguments: type[Arguments] = Arguments, *, of_queues: bool = False
) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        SHARES[run.__name__] = Registered(run, arguments, of_queues)
        return run

    return register


class ShareArguments(TopicArguments, frozen=True):
    of: str
    partitions: list[int]
    arguments: dict[str, Any]
    topic_id: int = 0  # that the asking node takes the topic to have


@method(ShareArguments)
async def share(engine: Engine, _: Caller, a: ShareArguments) -> Result:
    """Another node asks for our share of a call."""
    found = SHARES.get(a.of)
    if found is None:
        raise InvalidArgument(f"nobody has a share in {a.of}", field="of")
    arguments = parse(found.arguments, a.arguments)
    topic = engine.queue(a.topic) if found.of_queues else engine.topics[a.topic]
    check_id(topic, a.topic_id)
    here = [topic.here(index) for index in sorted(set(a.partitions))]
    return await found.run(NodeShare(engine, topic, here, arguments))


async def fan_out(
    engine: Engine,
    topic: ServedTopic,
    run: Run,
    arguments: Arguments = NO_ARGUMENTS,
    *,
    indices: Iterable[int] | None = None,
    in_turn: bool = False,
) -> list[Result]:
    """The share of every partition (or of those named), done by whoever serves it.

    `in_turn`: one node after the other; otherwise all at once.
    """
    if indices is None and len(topic.local) == len(topic.partitions):
        return [await run(NodeShare(engine, topic, list(topic.local), arguments))]
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    left = sorted(set(range(len(topic.partitions)) if indices is None else indices))
    results: list[Result] = []

    async def one(node: str, some: list[int]) -> Result | None:
        """The share of one node; None: it does not serve these partitions after all."""
        try:
            if node:
                result = await ask_share(topic, node, run, some, arguments)
            else:
                here = [topic.here(index) for index in some]
                result = await run(NodeShare(engine, topic, here, arguments))
        except PenstockError as error:
            if not_there(error) or error.details.get("sent") is False:
                return None
            raise
        left[:] = [index for index in left if index not in some]
        return result

    while left:
        groups = by_node(topic, left).items()
        if in_turn:
            found = [await one(node, some) for node, some in groups]
        else:
            found = await asyncio.gather(*(one(node, some) for node, some in groups))
        results += [result for result in found if result is not None]
        if left:
            if loop.time() >= deadline:
                raise nobody_serves(topic, left[0])
            await topic.router.changed(topic.key(left[0]))
    return results


def by_node(topic: ServedTopic, indices: Iterable[int]) -> dict[str, list[int]]:
    """Partitions by the node that serves them, which is empty for this one. Those that nobody
    serves are left out."""
    groups: dict[str, list[int]] = {}
    for index in indices:
        if topic.served(index) is not None:
            groups.setdefault("", []).append(index)
        elif node := topic.router.coordinator(topic.key(index)):
            groups.setdefault(node, []).append(index)
    return groups


async def ask_share(
    topic: ServedTopic,
    node: str,
    run: Run,
    indices: Iterable[int] = (),
    arguments: Arguments = NO_ARGUMENTS,
) -> Result:
    peer = topic.router.cluster.live(node)
    if peer is None:
        raise Unavailable(f"node {node} is not connected", sent=False)
    call = Call(
        "share",
        {"topic": topic.config.name, "of": run.__name__, "partitions": list(indices),
         "arguments": msgspec.to_builtins(arguments), "topic_id": topic.config.id},
    )  # fmt: skip
    result: Result = await peer.ask(FrameType.SUBSCRIBE, dict, pack(call))
    return result


def nobody_serves(topic: ServedTopic, index: int) -> Unavailable:
    return Unavailable(
        f"nobody serves partition {index} of {topic.config.name} at the moment", partition=index
    )


def merged(results: Iterable[Result], field: str) -> list[Any]:
    """The rows of all results, in the order of their partitions."""
    rows = [row for result in results for row in result[field]]
    return sorted(rows, key=lambda row: row["partition"])
