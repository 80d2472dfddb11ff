"""Subscribers get what their routes take, each delta once."""

from __future__ import annotations

import pytest
from tests.integration.harness import Node
from tests.unit.node.live.subscribing import (
    corpus,
    expected,
    payloads_of,
    put,
    subscribe,
    until,
)

from penstock.errors import InvalidArgument

ROUTES = [
    "namespace=a",
    "op=delete",
    "op=sparse namespace=b",
    "vector=a/v000000002",
    "header:team=search",
    "header:team=search op=create namespace=a",
    "* namespace=a",
]


@pytest.mark.parametrize("routes", ROUTES)
async def test_live_and_read_from_the_log(node: Node, routes: str) -> None:
    some = corpus(400)
    live = await subscribe(node, routes=routes.split())
    await put(node, payloads_of(some, 0, 150))
    await put(node, payloads_of(some, 150, 250), headers={"team": "search"})
    await put(node, payloads_of(some, 250), headers={"team": "ads"})
    wanted = expected(node, routes=routes)
    assert wanted
    behind = await subscribe(node, routes=routes.split(), start="sequence", at=1)
    for reader in (live, behind):
        await until(lambda reader=reader: len(reader.rows) >= len(wanted))  # type: ignore[misc]
        assert reader.rows == wanted


async def test_headers_come_with_the_delta(node: Node) -> None:
    reader = await subscribe(node)
    await put(node, payloads_of(corpus(5)), headers={"team": "search"})
    await until(lambda: reader.rows == expected(node))
    assert set(reader.headers) == {b"\x81\xa4team\xa6search"}


async def test_what_is_no_route_is_refused(node: Node) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await subscribe(node, routes=["namespace"])
    assert refused.value.field == "route"


async def test_a_position_is_told_though_nothing_is_wanted(node: Node) -> None:
    reader = await subscribe(node, routes=["namespace=nobody"])
    await put(node, payloads_of(corpus(50)))
    committed = node.engine.topics["vectors"].here(0).sequence_readable
    await until(lambda: reader.opened.settled == committed)
    await node.advance(1.2)
    assert [(f.count, f.position) for f in reader.frames] == [(0, committed)]
