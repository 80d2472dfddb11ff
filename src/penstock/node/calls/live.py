"""Calls about the live path: who is sent what, how far they are, their durable cursors, and the
vectors that a hosted index has near another, as of the last commit that it has taken.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from operator import itemgetter
from typing import Annotated, Any, Final

import msgspec

from penstock.errors import Backpressure, FailedPrecondition, NotFound
from penstock.model.topic import TopicKind
from penstock.node.calls.pages import Page, known_in_order, page_of, topics_behind
from penstock.node.calls.table import NodeShare, Result, fan_out, method, shared
from penstock.node.engine import Engine
from penstock.node.live.cursors import check_name
from penstock.node.live.hub import LISTS, SinkPort, place_of
from penstock.node.serve.topic import ServedTopic
from penstock.sinks import conditions
from penstock.wire.messages import ANSWER_BYTES_MAX, SEARCH_MAX, Text, bounded

KINDS: Final = ("ingest", *LISTS)
FILLING_RETRY_S: Final = 0.25  # until a search of an index that is being filled is made again


def delta_topic(engine: Engine, name: str) -> ServedTopic:
    topic = engine.topics[name]
    if topic.config.kind is not TopicKind.DELTA:
        raise FailedPrecondition(f"{name} is no delta topic", topic=name)
    return topic


@method()
async def live_status(engine: Engine, *, topic: str | None = None, after: Text = "") -> Result:
    """Active partitions, subscriptions and sinks of the delta topics, at their coordinators. A
    topic with more of them than fit goes on in the next page."""
    page = Page()
    told: dict[str, dict[str, Any]] = {}
    async with aclosing(_entries(engine, topic, after, page)) as entries:
        async for name, kind, row in entries:
            if not page.take(name, row):
                break
            of = name.partition(" ")[0]
            lists = told.setdefault(of, {"topic": of, **{each: [] for each in KINDS}})
            if kind:
                lists[kind].append(row)
    return {"topics": list(told.values()), "next": page.next}


async def _entries(
    engine: Engine, only: str | None, after: str, page: Page
) -> AsyncGenerator[tuple[str, str, Any], None]:
    """The name, the list and the row of all that there is to tell, behind `after`. Each topic
    begins with an entry of its own, which is in no list: it may have no rows."""
    if only is not None:
        known = {only: delta_topic(engine, only)}
    else:
        known = {n: t for n, t in engine.topics.items() if t.config.kind is TopicKind.DELTA}
    begun, _, place = after.partition(" ")
    topics, more = topics_behind(known, begun)
    if begun in known:
        topics.insert(0, known[begun])
    for topic in topics:
        name = topic.config.name
        if name != begun:
            yield name, "", name
        rows, cut = await _rows(engine, topic, place if name == begun else "")
        for at, (kind, row) in rows:
            yield f"{name} {at}", kind, row
        if cut:
            page.more = True
            return
    page.more = more


async def _rows(
    engine: Engine, topic: ServedTopic, after: str
) -> tuple[list[tuple[str, tuple[str, Any]]], bool]:
    """A topic's rows behind a place, as far as all nodes have told theirs; if there are more."""
    # A node of an earlier version cannot begin behind a place, and is not told the beginning.
    run = functools.partial(live_status_share, after=after) if after else live_status_share
    lists = []
    for result in await fan_out(engine, topic, run):
        told = [(_place(kind, row), (kind, row)) for kind in KINDS for row in result[kind]]
        behind = sorted((entry for entry in told if entry[0] > after), key=itemgetter(0))
        lists.append((behind, bool(result.get("next"))))
    return known_in_order(lists)


def _place(kind: str, row: dict[str, Any]) -> str:
    """What a node says of its queue comes before all partitions."""
    if kind == "ingest":
        return f"- {row['node']}"
    return place_of(kind, row["partition"], row.get("name", ""))


@shared()
async def live_status_share(share: NodeShare, *, after: str = "") -> Result:
    page = Page()
    told: dict[str, Any] = {kind: [] for kind in KINDS}
    for place, kind, row in _local_rows(share, after):
        if not page.take(place, row):
            break
        told[kind].append(row)
    return {**told, "next": page.next}


def _local_rows(share: NodeShare, after: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    engine, topic, partitions = share
    if topic.ingest is not None:
        row = {"node": engine.identity.node, **topic.ingest.status()}
        if (place := _place("ingest", row)) > after:
            yield place, "ingest", row
    hub = engine.hubs.get(topic.config.id)
    if hub is not None:
        yield from hub.rows([partition.index for partition in partitions], after)


@method()
async def cursor_list(engine: Engine, *, topic: str, after: Text = "") -> Result:
    rows = await engine.cursors.rows(delta_topic(engine, topic).config.id, after)
    return page_of(rows).told("cursors")


@method()
async def cursor_delete(engine: Engine, *, topic: str, name: str) -> Result:
    topic_id = delta_topic(engine, topic).config.id
    check_name(name)
    deleted = await engine.cursors.delete(topic_id, name)
    if not deleted:
        raise NotFound(f"topic {topic} has no cursor {name}", topic=topic)
    return {"deleted": deleted}


# --- searching ---


@method()
async def vector_search(
    engine: Engine,
    *,
    topic: str,
    vector: list[float],
    limit: int = 10,
    namespace: str | None = None,
    where: dict[str, Any] | None = None,
    sink: str | None = None,
    partial: bool = False,
) -> Result:
    """The nearest vectors, by the index that the nodes of the topic's partitions host: as many as
    an answer may hold, and of those whose metadata match `where`. `sink` names one of several
    indexes; one that does not hold everything yet answers only where `partial` is said."""
    served = delta_topic(engine, topic)
    bounded(limit, 1, SEARCH_MAX, "limit")
    if where is not None:
        conditions.read(where)
    search = functools.partial(
        vector_search_share, vector=vector, limit=limit, namespace=namespace, where=where, sink=sink
    )
    results = await fan_out(engine, served, search)
    filling = sorted(index for result in results for index in result["filling"])
    if filling and not partial:
        raise Backpressure(  # and not Unavailable: another node would be asked in vain
            f"the index of {topic} is being filled: partitions {', '.join(map(str, filling))}",
            retry_after_s=FILLING_RETRY_S,
            partitions=filling,
        )
    if all(result["neighbours"] is None for result in results):
        raise NotFound(f"no index of {topic} has vectors of {len(vector)} dimensions")
    return {"neighbours": _nearest(results, limit), "filling": filling}


def _nearest(results: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    lists = [
        ([(one["distance"], one) for one in result["neighbours"] or []], bool(result.get("cut")))
        for result in results
    ]
    rows = ((one["vector_id"], one) for _, one in known_in_order(lists)[0][:limit])
    return page_of(rows, bytes_max=ANSWER_BYTES_MAX).rows


@shared()
async def vector_search_share(
    share: NodeShare,
    *,
    vector: list[float],
    limit: Annotated[int, msgspec.Meta(ge=1, le=SEARCH_MAX)],
    namespace: str | None,
    where: dict[str, Any] | None,
    sink: str | None,
) -> Result:
    hosted = _index_of(share, sink)
    index: Any = hosted.sink
    chosen = {partition.index for partition in share.partitions}
    filling = hosted.filling(chosen)
    try:  # An index may be busy with a write for a while.
        found = await asyncio.to_thread(
            index.search, vector, limit, namespace=namespace, partitions=chosen,
            **({} if where is None else {"where": where}),
        )  # fmt: skip
    except NotFound:  # nothing is in these partitions yet; others may have something
        return {"neighbours": None, "filling": filling}
    page = page_of(((one.vector_id, vars(one)) for one in found), bytes_max=ANSWER_BYTES_MAX)
    return {"neighbours": page.rows, "filling": filling, "cut": page.more}


def _index_of(share: NodeShare, name: str | None) -> SinkPort:
    hub = share.engine.hubs.get(share.topic.config.id)
    for hosted in hub.sinks if hub is not None else ():
        if hasattr(hosted.sink, "search") and name in (None, hosted.name):
            return hosted
    what = "an index" if name is None else f"an index called {name}"
    raise FailedPrecondition(f"no node hosts {what} of {share.topic.config.name}")
