"""Sinks that the node runs: cursors, retries, the breaker, dead letters, and what they cost."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.recording import Recording, RecordingStates
from tests.unit.node.live.subscribing import (
    DIMENSIONS,
    TOPIC,
    corpus,
    delta_topic,
    expected,
    feed_of,
    payloads_of,
    put,
    subscribe,
    until,
    unwritten,
)

from penstock.config import Config
from penstock.errors import InvalidArgument, LimitExceeded
from penstock.model.delta_batch import deltas_of
from penstock.node.hosted.sink import HostedSink
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.options import LiveOptions
from penstock.wire.messages import OpenSubscription

KIND = "tests.unit.node.live.recording:"


class Hosting(Node):
    """A node with one sink of its own."""

    def __init__(self, path: Path, kind: str = "Recording", **table: Any) -> None:
        self.store = uuid.uuid4().hex
        sink = {
            "topic": TOPIC, "kind": KIND + kind, "name": "memory", "store": self.store,
            "backoff_s_base": 0.001, "backoff_s_cap": 0.01, "breaker_open_s": 0.05, "batch_ms": 0,
            **table,
        }  # fmt: skip
        live = LiveOptions(sink=(sink,), subscriptions_max=2)
        super().__init__(path, Config(data=path, drain_s=5.0, live=live))

    @property
    def sink(self) -> Any:
        return Recording.stores[self.store]

    @property
    def hosted(self) -> HostedSink:
        live = self.engine.topics[TOPIC].live
        assert live is not None
        return live.sinks[0]

    async def status(self) -> dict[str, Any]:
        found = await self.call("live_status", topic=TOPIC)
        return dict(found["topics"][0]["sinks"][0])

    async def caught_up(self) -> None:
        wanted = [row.ordinal for row in expected(self)]
        await until(lambda: len(self.sink.ordinals) >= len(wanted))
        assert self.sink.ordinals == wanted


async def hosting(path: Path, *args: Any, **table: Any) -> Hosting:
    node = Hosting(path, *args, **table)
    await node.start()
    await delta_topic(node)
    return node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Hosting]:
    node = await hosting(tmp_path / "data")
    yield node
    await node.stop()


async def test_a_sink_of_the_node_takes_no_subscribers_place(node: Hosting) -> None:
    await until(lambda: node.hosted.readings())
    await subscribe(node)
    await subscribe(node)
    with pytest.raises(LimitExceeded):
        await subscribe(node)


async def test_a_sink_gets_every_release_in_order(node: Hosting) -> None:
    await put(node, payloads_of(corpus(800)), size=30)
    await node.caught_up()
    assert {work.pipeline for work in node.sink.works} == {
        f"live-{node.engine.identity.replica_uuid}-{node.engine.topics[TOPIC].config.id}-0"
    }
    spans = [(work.first, work.last) for work in node.sink.works]
    assert spans == sorted(spans)


async def test_it_goes_on_from_its_cursor_after_a_restart(node: Hosting) -> None:
    some = corpus(600)
    await put(node, payloads_of(some, 0, 300))
    await node.caught_up()
    await node.stop()
    await node.start()
    await put(node, payloads_of(some, 300))
    await node.caught_up()
    listed = await node.call("cursor_list", topic=TOPIC)
    assert [c["name"] for c in listed["cursors"]] == ["sink-memory"]


async def test_a_client_cannot_move_its_cursor(node: Hosting) -> None:
    node.sink.state["failing"] = True
    await put(node, payloads_of(corpus(100)))
    request = OpenSubscription(TOPIC, 0, start="cursor", cursor="sink-memory", at=1)
    with pytest.raises(InvalidArgument, match="those of sinks"):
        await node.connection.subscribe(request, lambda *_: None)
    node.sink.state["failing"] = False
    await node.caught_up()


async def test_it_is_filled_once_it_holds_what_it_found(node: Hosting) -> None:
    await put(node, payloads_of(corpus(300)))
    await node.caught_up()
    assert node.hosted.filling([0]) == []
    await node.stop()
    node.sink.state["failing"] = True
    await node.start()
    await put(node, payloads_of(corpus(20, seed=2)))
    assert node.hosted.filling([0]) == [0]
    node.sink.state["failing"] = False
    await until(lambda: not node.hosted.filling([0]))
    node.sink.state["failing"] = True  # what comes later may be on its way
    await put(node, payloads_of(corpus(20, seed=3)))
    assert node.hosted.filling([0]) == []


async def test_failures_open_the_breaker_and_a_probe_closes_it(tmp_path: Path) -> None:
    node = await hosting(tmp_path / "data", breaker_failures=3, breaker_open_s=0.05)
    some = corpus(400)
    await put(node, payloads_of(some, 0, 100))
    await node.caught_up()
    opens = node.sink.state["opens"]
    node.sink.state["failing"] = True
    await put(node, payloads_of(some, 100, 300), size=20)
    await until(lambda: node.hosted.thread.runner.meter.opens >= 2)
    status = await node.status()
    assert status["breaker"]["state"] in ("open", "half_open")
    assert status["state"] == "waiting"
    assert "the sink is down" in status["last_error"]["message"]
    node.sink.state["failing"] = False
    await put(node, payloads_of(some, 300))
    await node.caught_up()
    assert node.sink.state["opens"] > opens, "a probe begins with a new connection"
    await until(lambda: node.hosted.thread.runner.retry.breaker_state == "closed")
    await node.stop()


async def test_a_sink_that_is_down_at_the_start_gets_all_of_it_later(tmp_path: Path) -> None:
    node = Hosting(tmp_path / "data")
    Recording("memory", store=node.store).state["failing"] = True
    await node.start()
    await delta_topic(node)
    await put(node, payloads_of(corpus(200)))
    assert not node.sink.works
    node.sink.state["failing"] = False
    await node.caught_up()
    await node.stop()


async def test_a_sink_that_hangs_costs_its_window_and_delays_nobody(tmp_path: Path) -> None:
    node = await hosting(tmp_path / "data", window_rows=50)
    await until(lambda: node.hosted.readings())
    reader = await subscribe(node)
    node.sink.free.clear()
    await put(node, payloads_of(corpus(900)), size=30)
    await until(lambda: len(reader.rows) == len(expected(node)))
    [(_, subscription)] = node.hosted.readings()
    assert subscription.state.value == "behind"
    assert sum(len(parcel.rows) for parcel in node.hosted.thread._waiting) <= 50
    node.sink.free.set()
    await node.caught_up()
    await node.stop()


@pytest.mark.parametrize("kind", ["Recording", "Inline"])
async def test_what_a_sink_rejects_goes_to_its_dead_letters(tmp_path: Path, kind: str) -> None:
    node = await hosting(tmp_path / "data", kind)
    some = corpus(300)
    node.sink.state["refuse"] = "v000000002"
    await put(node, payloads_of(some), size=50)
    refused = expected(node, routes="vector=a/v000000002 vector=b/v000000002")
    assert refused
    await until(lambda: f"{TOPIC}-dlq-memory" in node.engine.topics)
    await until(lambda: node.hosted.thread.runner.meter.dead_letters == len(refused))
    letters = await node.pop(f"{TOPIC}-dlq-memory", limit=1000)
    assert sorted(letter["payload"] for letter in letters) == sorted(r.payload for r in refused)
    assert letters[0]["headers"]["penstock-sink"] == "memory"
    assert {row.ordinal for row in expected(node)} == set(node.sink.ordinals)
    await node.stop()


@pytest.mark.parametrize("kind", ["RecordingStates", "Forgetful"])
async def test_a_sink_of_states_ends_up_with_the_fold(tmp_path: Path, kind: str) -> None:
    node = await hosting(tmp_path / "data", kind)
    some = corpus(800)
    await put(node, payloads_of(some, 0, 400), size=20)
    await settled(node)
    if kind == "Forgetful":
        node.sink.works.clear()
    await node.restart()
    await put(node, payloads_of(some, 400), size=100)
    await settled(node)
    fold = Propagator(DIMENSIONS)
    log = node.engine.topics[TOPIC].here(0).log
    fold.feed(deltas_of(list(log.reader.scan(1))), through=log.sequence_last)
    states = fold.states()
    names = [names.tolist() for names in (states.namespace, states.vector_id)]
    wanted = {
        (namespace.decode(), vector_id.decode()): (int(revision), bool(deleted), values.tolist())
        for namespace, vector_id, revision, deleted, values in zip(
            *names, states.revision, states.deleted, states.values, strict=True
        )
    }
    assert isinstance(node.sink, RecordingStates)
    assert node.sink.vectors == wanted
    await node.stop()


async def settled(node: Hosting) -> None:
    """Wait until the sink has written all that is committed."""

    def done() -> bool:
        readings = node.hosted.readings()
        committed = node.engine.topics[TOPIC].here(0).sequence_readable
        return (
            bool(readings)
            and readings[0][1].settled == committed
            and not (readings[0][1]._credit.entries_out)
        )

    await until(done)


async def test_a_table_that_will_not_do_is_refused(tmp_path: Path) -> None:
    for wrong, field in (
        ({"topic": ""}, "topic"),
        ({"name": "a/b"}, "name"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"route": "nonsense"}, "route"),
        ({"unheard": 1}, "unheard"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await hosting(tmp_path / field, **wrong)
        assert refused.value.field == field


async def test_states_are_never_ahead_of_the_commit(tmp_path: Path) -> None:
    node = await hosting(tmp_path / "data", "RecordingStates")
    some = corpus(80)
    await put(node, payloads_of(some, 0, 40))
    await until(lambda: node.sink.works)
    feed = feed_of(node)
    await until(lambda: feed.sequence == feed.fold.sequence and feed.fold_idle)
    async with unwritten(node, payloads_of(some, 40), size=20):
        assert feed.fold.sequence == feed.sequence
    await until(lambda: feed.sequence == feed.fold.sequence and feed.fold_idle)
    node.hosted.readings()[0][1].close()
    async with unwritten(node, payloads_of(corpus(20, seed=9)), size=20):
        await until(lambda: feed.fold.sequence == feed.sequence + 20)
    await node.stop()


@pytest.mark.parametrize("kind", ["Recording", "Inline"])
async def test_rows_are_timed_from_their_commit_to_the_end_of_the_write(
    tmp_path: Path, kind: str
) -> None:
    node = await hosting(tmp_path / "data", kind)
    await until(lambda: [s for _, s in node.hosted.readings() if s.state.value == "live"])
    began = perf_counter()
    node.sink.slow_s = 0.05
    await put(node, payloads_of(corpus(20, duplicates=0.0, disorder=0.0)), size=20)
    await until(lambda: node.hosted.thread.timings.count)
    await node.caught_up()
    [work] = node.sink.works
    assert began < work.committed_at < perf_counter() - 0.05
    timed = (await node.status())["timings"]["written"]
    assert timed["count"] == 20
    assert 0.05 <= timed["p50_us"] / 1e6 < perf_counter() - began
    await node.stop()


async def test_what_was_read_from_the_log_is_not_timed(node: Hosting) -> None:
    node.sink.state["failing"] = True
    await node.stop()
    await node.start()
    await put(node, payloads_of(corpus(100)))
    node.sink.state["failing"] = False
    await node.caught_up()
    assert {work.committed_at for work in node.sink.works} == {None}
    assert (await node.status())["timings"]["written"]["count"] == 0
