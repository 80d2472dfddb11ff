"""How long it took, from each commit on, and the quantiles that the status shows."""

from __future__ import annotations

import asyncio
import re
import threading
from time import perf_counter

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    TOPIC,
    corpus,
    feed_of,
    payloads_of,
    put,
    subscribe,
    until,
)

from penstock.demo.corpus import SPARSE_ONLY
from penstock.node.live.partition import LivePartition
from penstock.node.live.telemetry import COMMITS_MAX, KEPT, Commits, Timings


def test_quantiles_count_rows_and_not_feeds() -> None:
    timings = Timings()
    timings.record(0.001, rows=1)
    timings.record(0.0001, rows=98)
    timings.record(0.002, rows=1)
    found = timings.summary()
    assert (found["p50_us"], found["p99_us"], found["count"]) == (100.0, 1000.0, 100)


def test_only_the_last_ones_count() -> None:
    timings = Timings()
    assert timings.summary() == {"count": 0, "p50_us": None, "p95_us": None, "p99_us": None}
    for _ in range(KEPT):
        timings.record(0.5, rows=1)
    for _ in range(KEPT):
        timings.record(0.000_25, rows=2)
    found = timings.summary()
    assert (found["p50_us"], found["p99_us"], found["count"]) == (250.0, 250.0, 3 * KEPT)


async def timed(node: Node, stage: str) -> dict[str, float]:
    status = await node.call("live_status", topic=TOPIC)
    found: dict[str, float] = status["topics"][0]["partitions"][0]["timings"][stage]
    return found


async def sent(node: Node) -> dict[str, float]:
    """Quantiles from the commit on, in seconds."""
    found = await timed(node, "sent")
    return {name: us / 1e6 for name, us in found.items() if name != "count"}


def pushed_s(node: Node) -> float:
    """The same in the metrics, over all deltas."""
    text = node.engine.metrics.text().decode()
    [found] = re.findall(rf'penstock_live_push_seconds_sum{{topic="{TOPIC}"}} (\S+)', text)
    return float(found)


async def test_each_delta_counts_from_its_own_commit(node: Node) -> None:
    reader = await subscribe(node)
    feed = feed_of(node)
    feed._ahead = False
    feed._thread.busy = True  # as if a thread had the fold
    some = corpus(11, ops=SPARSE_ONLY, disorder=0.0, duplicates=0.0, concurrent=0.0)
    began, acked = [], []
    for payload in payloads_of(some):
        began.append(perf_counter())
        await put(node, [payload])
        acked.append(perf_counter())
    feed._thread.busy = False
    waited = [perf_counter() - at for at in acked]
    feed._run()
    assert len(reader.rows) == 11
    longest = [perf_counter() - at for at in began]
    found = await sent(node)
    assert waited[0] <= found["p99_us"] <= longest[0]
    assert waited[5] <= found["p50_us"] <= longest[5]
    assert sum(waited) <= pushed_s(node) <= sum(longest)


async def test_what_waits_to_be_written_counts_since_it_came(node: Node) -> None:
    await subscribe(node)
    topic = node.engine.topics[TOPIC]
    full = True
    live_room = topic.live_room
    assert live_room is not None
    topic.live_room = lambda: 0 if full else live_room()
    began = perf_counter()
    putting = asyncio.create_task(put(node, payloads_of(corpus(10))))
    await until(lambda: topic.ingest is not None and topic.ingest.queue.depth)
    came, waited_from = perf_counter() - began, perf_counter()
    assert (await timed(node, "staged"))["count"] == 0
    full = False
    topic.wake()  # the clock of this node stands still, and with it the next look
    least = perf_counter() - waited_from
    await putting
    found = await timed(node, "staged")
    assert found["count"] == 10
    assert least <= found["p50_us"] / 1e6 <= came + perf_counter() - waited_from


async def test_what_is_committed_while_the_log_is_folded_counts_since_then(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, go_on, fold_next = threading.Event(), threading.Event(), LivePartition._fold_slice

    def fold_and_wait(feed: LivePartition, through: int) -> bool:
        more = fold_next(feed, through)
        if not more:
            ended.set()
            go_on.wait(60)
        return more

    monkeypatch.setattr(LivePartition, "_fold_slice", fold_and_wait)
    began = perf_counter()
    subscribing = asyncio.create_task(subscribe(node))
    await until(ended.is_set)
    await put(node, payloads_of(corpus(10)))
    go_on.set()
    await subscribing
    assert (await sent(node))["p99_us"] <= perf_counter() - began


def test_a_stretch_of_which_a_part_is_delivered_keeps_its_time() -> None:
    commits = Commits()
    commits.add(10, 1.0)
    commits.add(30, 2.0)
    commits.add(40, 3.0)
    assert commits.take(20) == [(10, 1.0), (20, 2.0)]
    assert commits.take(30) == [(30, 2.0)]
    assert commits.take(40) == [(40, 3.0)]
    assert commits.take(41) == []


def test_of_many_commits_two_count_as_one_since_the_older() -> None:
    commits = Commits()
    for number in range(10 * COMMITS_MAX):
        commits.add(number + 1, float(number))
    found = commits.take(10 * COMMITS_MAX)
    assert len(found) <= COMMITS_MAX
    ends = [0, *(sequence for sequence, _ in found)]
    assert ends[-1] == 10 * COMMITS_MAX
    assert [since for _, since in found] == ends[:-1], "each since its first commit"
