"""Asking a hosted index: the vectors near another, as of the last commit that it has taken."""

from __future__ import annotations

import asyncio
import heapq
from functools import partial
from typing import Any, Final

from penstock.errors import Backpressure, FailedPrecondition, NotFound
from penstock.node.calls import Arguments, Caller, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.live_calls import delta_topic
from penstock.node.partition import Partition
from penstock.node.shares import fan_out, shared
from penstock.node.topic import Topic

FILLING_RETRY_S: Final = 0.25  # until a search of an index that is being filled is made again


class SearchArguments(TopicArguments, frozen=True):
    vector: list[float]
    limit: int = 10
    namespace: str | None = None
    sink: str | None = None  # of several indexes, the one of this name
    partial: bool = False  # also by an index that does not hold everything yet


class SearchShare(Arguments, frozen=True):
    vector: list[float]
    limit: int
    namespace: str | None
    sink: str | None


@method(SearchArguments)
async def vector_search(engine: Engine, _: Caller, a: SearchArguments) -> dict[str, Any]:
    """The nearest vectors, by the index that the nodes of the topic's partitions host."""
    topic = delta_topic(engine, a.topic)
    results = await fan_out(
        engine, topic, vector_search_share,
        vector=a.vector, limit=a.limit, namespace=a.namespace, sink=a.sink,
    )  # fmt: skip
    filling = sorted(index for result in results for index in result["filling"])
    if filling and not a.partial:
        raise Backpressure(  # and not Unavailable: another node would be asked in vain
            f"the index of {a.topic} is being filled: partitions {', '.join(map(str, filling))}",
            retry_after_s=FILLING_RETRY_S,
            partitions=filling,
        )
    if all(result["neighbours"] is None for result in results):
        raise NotFound(f"no index of {a.topic} has vectors of {len(a.vector)} dimensions")
    known = [result["neighbours"] or [] for result in results]
    found = heapq.merge(*known, key=lambda one: one["distance"])
    return {"neighbours": list(found)[: a.limit], "filling": filling}


@shared(SearchShare)
async def vector_search_share(
    engine: Engine, topic: Topic, partitions: list[Partition], asked: dict[str, Any]
) -> dict[str, Any]:
    wanted = asked["sink"]
    indexes = [
        hosted
        for hosted in (topic.live.sinks if topic.live is not None else ())
        if hasattr(hosted.sink, "search") and wanted in (None, hosted.name)
    ]
    if not indexes:
        what = "an index" if wanted is None else f"an index called {wanted}"
        raise FailedPrecondition(f"no node hosts {what} of {topic.config.name}")
    index: Any = indexes[0].sink
    chosen = {partition.index for partition in partitions}
    filling = indexes[0].filling(chosen)
    # An index may be busy with a write for a while.
    search = partial(
        index.search, asked["vector"], asked["limit"], namespace=asked["namespace"],
        partitions=chosen,
    )  # fmt: skip
    try:
        found = await asyncio.to_thread(search)
    except NotFound:  # nothing is in these partitions yet; others may have something
        return {"neighbours": None, "filling": filling}
    return {"neighbours": [vars(one) for one in found], "filling": filling}
