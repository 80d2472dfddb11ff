"""Parents that may be in the log from before the fold's memory of ids.

The first sequence of a log is the node's own; batches of ten begin at 2, 12, 22.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import TOPIC, put, subscribe
from tests.unit.node.live.test_quarantine import (
    DEDUP_S,
    PARENT,
    change,
    partition_status,
    time_out,
)

from penstock.log.reader import Reader
from penstock.node.live.catch_up import ParentSearch


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From which sequences on the log is read by who can wait."""
    found: list[int] = []
    read_slice = Reader.read_slice

    def read(reader: Reader, first: int, *, nowait: bool, **how: Any) -> Any:
        if not nowait:
            found.append(first)
        return read_slice(reader, first, nowait=nowait, **how)

    monkeypatch.setattr(Reader, "read_slice", read)
    return found


async def test_a_parent_from_before_the_memory_is_found(node: Node) -> None:
    first = b"%016d" % 1
    await put(node, [change(1), change(2, vector="v1", counter=2, parent=first)])
    await node.advance(DEDUP_S + 60)
    reader = await subscribe(node)
    child = change(3, vector="v1", origin="x", parent=first)
    await put(node, [child, change(4, parent=PARENT)])
    await time_out(node, 5)
    assert [row.payload for row in reader.rows] == [child, change(5)]
    assert (await partition_status(node))["quarantined"] == {"parent missing": 1}


async def test_all_that_wait_are_looked_for_together(node: Node, reads: list[int]) -> None:
    await put(node, [change(number) for number in range(1, 101)], size=10)
    await node.advance(DEDUP_S + 60)
    await subscribe(node)
    for number in range(101, 110):
        await put(node, [change(number, parent=b"p%015d" % number)])
        await node.advance(1)
    reads.clear()
    await node.advance(20)
    for number in range(110, 125):
        await put(node, [change(number)])
        await node.advance(1)
    await time_out(node, 125)
    assert (await partition_status(node))["quarantined"] == {"parent missing": 9}
    assert reads.count(1) == 1


async def test_what_was_looked_at_is_not_read_again(node: Node, reads: list[int]) -> None:
    await put(node, [change(number) for number in range(1, 31)], size=10)
    parents = ParentSearch(node.engine.topics[TOPIC].here(0).log)
    late, never = b"%016d" % 15, b"n" * 16
    assert parents.find({never}, waiting={late}, horizon=12) == set()
    assert parents.find({late}, waiting={never}, horizon=12) == set()
    assert reads == [1]
    assert parents.find({late, never}, waiting=set(), horizon=22) == {late}
    assert reads == [1, 12]
    assert parents.find({late}, waiting=set(), horizon=22) == {late}
    assert parents.find({b"%016d" % 25}, waiting=set(), horizon=32) == {b"%016d" % 25}
    assert reads == [1, 12, 1]


async def test_who_was_not_reached_is_looked_for_from_there(
    node: Node, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.node.live.catch_up.SEARCH_BYTES", 1)
    await put(node, [change(number) for number in range(1, 31)], size=10)
    parents = ParentSearch(node.engine.topics[TOPIC].here(0).log)
    soon, later = b"%016d" % 5, b"%016d" % 25
    assert parents.find({soon}, waiting={later}, horizon=32) == {soon}
    assert reads == [1, 2]
    assert parents.find({later}, waiting={soon}, horizon=32) == {later}
    assert reads == [1, 2, 12, 22]
