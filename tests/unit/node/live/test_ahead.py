"""What is being written is folded meanwhile, and told to nobody before it is committed."""

from __future__ import annotations

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    corpus,
    expected,
    feed_of,
    payloads_of,
    put,
    subscribe,
    until,
    unwritten,
)

from penstock.node.live import partition


async def test_it_is_folded_before_it_is_committed(node: Node) -> None:
    reader = await subscribe(node)
    feed = feed_of(node)
    before = feed.sequence
    async with unwritten(node, payloads_of(corpus(60)), size=20):
        assert feed.fold.sequence == before + 60
        assert not feed.fold_idle
        assert (feed.sequence, reader.rows) == (before, [])
    await until(lambda: len(reader.rows) >= len(expected(node)))
    assert reader.rows == expected(node)
    assert feed.fold_idle


async def test_who_needs_states_has_none_folded_ahead(node: Node) -> None:
    reader = await subscribe(node)
    feed = feed_of(node)
    before, feed._ahead = feed.sequence, False
    async with unwritten(node, payloads_of(corpus(60)), size=20):
        assert feed.fold.sequence == before
        assert feed.fold_idle
    await until(lambda: reader.rows == expected(node))


async def test_only_so_much_is_folded_ahead(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "AHEAD_FEEDS_MAX", 2)
    reader = await subscribe(node)
    feed = feed_of(node)
    before = feed.sequence
    async with unwritten(node, payloads_of(corpus(100)), size=10):
        assert feed.fold.sequence == before + 20
    await until(lambda: len(reader.rows) >= len(expected(node)))
    assert reader.rows == expected(node)


async def test_what_was_never_committed_is_told_to_nobody(node: Node) -> None:
    reader = await subscribe(node)
    feed = feed_of(node)
    some = corpus(80)
    await put(node, payloads_of(some, 0, 40))
    told, before = list(reader.rows), feed.sequence
    async with unwritten(node, payloads_of(some, 40), size=40):
        assert feed.fold.sequence == before + 40
        feed.close()
    assert reader.rows == told
