"""A sink of the node whose log has lost what it would need next, and how it goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.node.live.subscribing import (
    TOPIC,
    corpus,
    cut,
    delta_topic,
    payloads_of,
    put,
    until,
)
from tests.unit.node.live.test_hosted_sink import Hosting, settled

from penstock.log.flush import LogOptions
from penstock.node.hosted import sink as hosted


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hosting]:
    monkeypatch.setattr(hosted, "AGAIN_S", 0.01)
    node = Hosting(tmp_path / "data", window_rows=20)
    small = LogOptions(segment_bytes=64 << 10, allocate_bytes=32 << 10, reserve_bytes=8 << 10)
    node.config = msgspec.structs.replace(node.config, log=small)
    await node.start()
    await delta_topic(node, retention_ms=1000)
    await put(node, payloads_of(corpus(100)))
    await node.caught_up()
    node.sink.state["failing"] = True
    await put(node, payloads_of(corpus(1500, seed=2)))
    await cut(node)
    node.sink.state["failing"] = False
    yield node
    await node.stop()


async def is_halted(node: Hosting) -> None:
    await until(lambda: node.hosted.halted)
    assert (await node.status())["state"] == "halted"
    await node.engine.cursors.flush()
    node.sink.works.clear()


async def goes_on(node: Hosting) -> None:
    """It is given what comes."""
    await until(lambda: node.hosted.readings())
    more = corpus(50, namespaces=("new",), duplicates=0.0, disorder=0.0)
    await put(node, payloads_of(more))
    await settled(node)
    assert (await node.status())["state"] != "halted"
    assert node.sink.works[-1].last == node.engine.topics[TOPIC].here(0).sequence_readable


async def test_it_goes_on_once_its_cursor_is_deleted(
    node: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "PROBE_S", 0.01)
    await is_halted(node)
    await node.call("cursor_delete", topic=TOPIC, name="sink-memory")
    await goes_on(node)
    first = node.engine.topics[TOPIC].here(0).log.sequence_first
    assert first <= node.sink.works[0].first < first + 60, "what had waited since before is gone"


async def test_a_new_tenure_tries_anew(node: Hosting) -> None:
    await is_halted(node)
    topic = node.engine.topics[TOPIC]
    partition = topic.here(0)
    topic.unserve(0)
    assert not node.hosted.halted
    await node.call("cursor_delete", topic=TOPIC, name="sink-memory")
    topic.serve(partition)
    await goes_on(node)
