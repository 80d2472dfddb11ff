"""Calls about the live path: who is sent what, how far they are, their durable cursors, and the
vectors that a hosted index has near another, as of the last commit that it has taken.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, Final

import msgspec

from penstock.errors import Backpressure, FailedPrecondition, NotFound
from penstock.model.topic import TopicKind
from penstock.node.calls.fan_out import NodeShare, fan_out, shared
from penstock.node.calls.pages import Page, page_of, topics_behind
from penstock.node.calls.table import (
    Arguments,
    Caller,
    PageArguments,
    Result,
    TopicArguments,
    method,
)
from penstock.node.engine import Engine
from penstock.node.live.cursors import check_name
from penstock.node.live.hub import LISTS, place_of
from penstock.node.serve.topic import ServedTopic
from penstock.wire.limits import ANSWER_BYTES_MAX, SEARCH_MAX, bounded

KINDS: Final = ("ingest", *LISTS)
FILLING_RETRY_S: Final = 0.25  # until a search of an index that is being filled is made again


class LiveStatusArguments(PageArguments, frozen=True):
    topic: str | None = None


class LiveShare(Arguments, frozen=True, omit_defaults=True):
    after: str = ""  # a node of an earlier version is not told it: it cannot begin behind a place


class CursorListArguments(PageArguments, frozen=True, kw_only=True):
    topic: str


class CursorArguments(TopicArguments, frozen=True):
    name: str


def delta_topic(engine: Engine, name: str) -> ServedTopic:
    topic = engine.topics[name]
    if topic.config.kind is not TopicKind.DELTA:
        raise FailedPrecondition(f"{name} is no delta topic", topic=name)
    return topic


@method(LiveStatusArguments)
async def live_status(engine: Engine, _: Caller, a: LiveStatusArguments) -> Result:
    """Active partitions, subscriptions and sinks of the delta topics, at their coordinators. A
    topic with more of them than fit goes on in the next page."""
    page = Page()
    told: dict[str, dict[str, Any]] = {}
    async with aclosing(_entries(engine, a, page)) as entries:
        async for name, kind, row in entries:
            if not page.take(name, row):
                break
            topic = name.partition(" ")[0]
            lists = told.setdefault(topic, {"topic": topic, **{each: [] for each in KINDS}})
            if kind:
                lists[kind].append(row)
    return {"topics": list(told.values()), "next": page.next}


async def _entries(
    engine: Engine, a: LiveStatusArguments, page: Page
) -> AsyncGenerator[tuple[str, str, Any], None]:
    """The name, the list and the row of all that there is to tell, behind `a.after`. Each topic
    begins with an entry of its own, which is in no list: it may have no rows."""
    if a.topic is not None:
        known = {a.topic: delta_topic(engine, a.topic)}
    else:
        known = {n: t for n, t in engine.topics.items() if t.config.kind is TopicKind.DELTA}
    begun, _, place = a.after.partition(" ")
    topics, more = topics_behind(known, begun)
    if begun in known:
        topics.insert(0, known[begun])
    for topic in topics:
        name = topic.config.name
        if name != begun:
            yield name, "", name
        rows, cut = await _rows(engine, topic, place if name == begun else "")
        for at, kind, row in rows:
            yield f"{name} {at}", kind, row
        if cut:
            page.more = True
            return
    page.more = more


async def _rows(
    engine: Engine, topic: ServedTopic, after: str
) -> tuple[list[tuple[str, str, Any]], bool]:
    """The rows of a topic behind a place, as far as all nodes have told theirs; whether that is
    not all."""
    results = await fan_out(engine, topic, live_status_share, LiveShare(after=after))
    found = [
        (place, kind, row)
        for result in results
        for kind in KINDS
        for row in result[kind]
        if (place := _place(kind, row)) > after
    ]
    ends = [result["next"] for result in results if result.get("next")]
    if ends:
        found = [entry for entry in found if entry[0] <= min(ends)]
    return sorted(found, key=itemgetter(0)), bool(ends)


def _place(kind: str, row: dict[str, Any]) -> str:
    """What a node says of its queue comes before all partitions."""
    if kind == "ingest":
        return f"- {row['node']}"
    return place_of(kind, row["partition"], row.get("name", ""))


@shared(LiveShare)
async def live_status_share(share: NodeShare) -> Result:
    page = Page()
    told: dict[str, Any] = {kind: [] for kind in KINDS}
    for place, kind, row in _local_rows(share):
        if not page.take(place, row):
            break
        told[kind].append(row)
    return {**told, "next": page.next}


def _local_rows(share: NodeShare) -> Iterator[tuple[str, str, dict[str, Any]]]:
    engine, topic, after = share.engine, share.topic, share.arguments.after
    if topic.ingest is not None:
        row = {"node": engine.identity.node, **topic.ingest.status()}
        if (place := _place("ingest", row)) > after:
            yield place, "ingest", row
    hub = engine.hubs.get(topic.config.id)
    if hub is not None:
        yield from hub.rows([partition.index for partition in share.partitions], after)


@method(CursorListArguments)
async def cursor_list(engine: Engine, _: Caller, a: CursorListArguments) -> Result:
    topic = delta_topic(engine, a.topic)
    page = page_of(await engine.cursors.rows(topic.config.id, a.after))
    return {"cursors": page.rows, "next": page.next}


@method(CursorArguments)
async def cursor_delete(engine: Engine, _: Caller, a: CursorArguments) -> Result:
    """Forget a cursor. Who uses it at the moment goes on, and will write it again."""
    topic = delta_topic(engine, a.topic)
    check_name(a.name)
    deleted = await engine.cursors.delete(topic.config.id, a.name)
    if not deleted:
        raise NotFound(f"topic {a.topic} has no cursor {a.name}", topic=a.topic)
    return {"deleted": deleted}


class SearchArguments(TopicArguments, frozen=True):
    vector: list[float]
    limit: int = 10
    namespace: str | None = None
    sink: str | None = None  # of several indexes, the one of this name
    partial: bool = False  # also by an index that does not hold everything yet


class SearchShare(Arguments, frozen=True):
    vector: list[float]
    limit: Annotated[int, msgspec.Meta(ge=1, le=SEARCH_MAX)]
    namespace: str | None
    sink: str | None


@method(SearchArguments)
async def vector_search(engine: Engine, _: Caller, a: SearchArguments) -> Result:
    """The nearest vectors, by the index that the nodes of the topic's partitions host: as many as
    an answer may hold."""
    topic = delta_topic(engine, a.topic)
    bounded(a.limit, 1, SEARCH_MAX, "limit")
    wanted = SearchShare(vector=a.vector, limit=a.limit, namespace=a.namespace, sink=a.sink)
    results = await fan_out(engine, topic, vector_search_share, wanted)
    filling = sorted(index for result in results for index in result["filling"])
    if filling and not a.partial:
        raise Backpressure(  # and not Unavailable: another node would be asked in vain
            f"the index of {a.topic} is being filled: partitions {', '.join(map(str, filling))}",
            retry_after_s=FILLING_RETRY_S,
            partitions=filling,
        )
    if all(result["neighbours"] is None for result in results):
        raise NotFound(f"no index of {a.topic} has vectors of {len(a.vector)} dimensions")
    return {"neighbours": _nearest(results, a.limit), "filling": filling}


def _nearest(results: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """The first of all lists. Past the end of a list that was cut nobody knows what is nearest."""
    known = [result["neighbours"] or [] for result in results]
    ends = [result["neighbours"][-1]["distance"] for result in results if result.get("cut")]
    merged = heapq.merge(*known, key=lambda one: one["distance"])
    page = Page(ANSWER_BYTES_MAX)
    for one in itertools.islice(merged, limit):
        if one["distance"] > min(ends, default=math.inf) or not page.take(one["vector_id"], one):
            break
    return page.rows


@shared(SearchShare)
async def vector_search_share(share: NodeShare) -> Result:
    a: SearchShare = share.arguments
    hub = share.engine.hubs.get(share.topic.config.id)
    indexes = [
        hosted
        for hosted in (hub.sinks if hub is not None else ())
        if hasattr(hosted.sink, "search") and a.sink in (None, hosted.name)
    ]
    if not indexes:
        what = "an index" if a.sink is None else f"an index called {a.sink}"
        raise FailedPrecondition(f"no node hosts {what} of {share.topic.config.name}")
    index: Any = indexes[0].sink
    chosen = {partition.index for partition in share.partitions}
    filling = indexes[0].filling(chosen)
    # An index may be busy with a write for a while.
    search = partial(index.search, a.vector, a.limit, namespace=a.namespace, partitions=chosen)
    try:
        found = await asyncio.to_thread(search)
    except NotFound:  # nothing is in these partitions yet; others may have something
        return {"neighbours": None, "filling": filling}
    page = Page(ANSWER_BYTES_MAX)
    for one in found:
        if not page.take(one.vector_id, vars(one)):
            break
    return {"neighbours": page.rows, "filling": filling, "cut": page.more}
