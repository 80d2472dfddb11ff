"""A node that hosts an index of its own: a search sees a change without a pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.client.delta.deltas import Deltas
from penstock.config import Config
from penstock.errors import (
    Backpressure,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from penstock.node.calls import live as search_calls
from penstock.propagation.options import LiveOptions
from penstock.server.embedded import open_embedded
from penstock.server.serve import listen, port_of
from penstock.sinks.memory_index import MemoryIndexSink


class GatedIndex(MemoryIndexSink):
    """An index that opens when its gate is there."""

    def __init__(self, name: str, *, gate: str, metric: str) -> None:
        super().__init__(name, metric=metric)
        self._gate = Path(gate)

    def open(self) -> None:
        if not self._gate.exists():
            raise Unavailable("the gate is shut")


INDEX: dict[str, Any] = {"topic": "vectors", "kind": "memory", "metric": "l2", "batch_ms": 0}


@asynccontextmanager
async def running(folder: Path, *sinks: dict[str, Any]) -> AsyncIterator[Deltas]:
    config = Config(data=folder, native_port=-1, drain_s=1.0, live=LiveOptions(sink=sinks))
    node = await open_embedded(folder, config=config)
    server = await listen(node.engine, host="127.0.0.1", port=0, tls=None)
    try:
        async with penstock.connect(f"penstock://127.0.0.1:{port_of(server)}") as client:
            yield client.deltas("vectors", dimensions=2, create=True, partitions=2)
    finally:
        server.close()
        await node.close()


async def found(deltas: Deltas, wanted: list[str], *near: float) -> list[dict[str, Any]]:
    """The neighbours, once they are those: an index follows in a thread of its own."""
    async with asyncio.timeout(60):
        while True:
            try:
                neighbours = await deltas.search(near, len(wanted))
            except penstock.NotFound:
                neighbours = []
            if [one["vector_id"] for one in neighbours] == wanted:
                return neighbours
            await asyncio.sleep(0.01)


async def test_a_search_sees_a_change(tmp_path: Path) -> None:
    async with running(tmp_path, INDEX) as deltas:
        await deltas.create("east", [1, 0], metadata={"side": "right"})
        await deltas.create("north", [0, 1])
        (nearest,) = await found(deltas, ["east"], 1, 0)
        assert (nearest["distance"], nearest["metadata"]) == (0.0, {"side": "right"})
        await deltas.set("north", {0: 5.0})
        await found(deltas, ["north", "east"], 5, 1)
        await deltas.delete("north")
        await found(deltas, ["east"], 5, 1)


async def test_a_search_is_about_metadata(tmp_path: Path) -> None:
    async with running(tmp_path, INDEX) as deltas:
        for number in range(20):
            await deltas.create(f"v{number}", [number, 0], metadata={"n": number})
        await found(deltas, ["v19"], 19, 0)
        neighbours = await deltas.search([0, 0], 3, where={"n": {"$gte": 17}})
        assert [one["vector_id"] for one in neighbours] == ["v17", "v18", "v19"]
        with pytest.raises(InvalidArgument) as refused:
            await deltas.search([0, 0], 3, where={"n": {"$like": 17}})
        assert refused.value.field == "where.n"


async def test_an_index_is_filled_again_when_the_node_starts(tmp_path: Path) -> None:
    async with running(tmp_path, INDEX) as deltas:
        for number in range(20):
            await deltas.create(f"v{number}", [number, 0])
        await found(deltas, ["v7"], 7, 0)
    async with running(tmp_path, INDEX) as deltas:
        neighbours = await deltas.search([19.2, 0], 2)  # the first answer: it waited
        assert [one["vector_id"] for one in neighbours] == ["v19", "v18"]


async def test_a_search_of_an_index_that_is_being_filled_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as deltas:
        await deltas.create("a", [1, 0])
    gate = tmp_path / "open"
    gated = {**INDEX, "kind": f"{__name__}:GatedIndex", "name": "gated", "gate": str(gate)}
    async with running(tmp_path, gated) as deltas:
        await deltas.opened()
        ask = (await deltas.topic.link.connection()).call
        asked = {"topic": "vectors", "vector": [1.0, 0.0]}
        with pytest.raises(Backpressure, match="being filled: partitions 0, 1") as refused:
            await ask("vector_search", **asked)
        assert refused.value.details["partitions"] == [0, 1]
        with pytest.raises(NotFound):  # it is empty
            await ask("vector_search", **asked, partial=True)
        gate.touch()
        assert [one["vector_id"] for one in await deltas.search([1, 0])] == ["a"]


async def test_a_search_without_an_index_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as deltas:
        await deltas.create("a", [1, 0])
        with pytest.raises(FailedPrecondition, match="no node hosts an index"):
            await deltas.search([1, 0])


async def test_a_wrong_question_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, INDEX) as deltas:
        await deltas.create("a", [1, 0])
        await found(deltas, ["a"], 1, 0)
        with pytest.raises(InvalidArgument, match="k is 0"):
            await deltas.search([1, 0], 0)
        with pytest.raises(FailedPrecondition, match="called other"):
            await deltas.search([1, 0], sink="other")


@pytest.mark.parametrize("limit", [-1, 0, 1001])
async def test_a_search_is_for_a_thousand_neighbours_at_most(tmp_path: Path, limit: int) -> None:
    """Before, the node took up to 10 000 of them, and refused others in the name of an argument
    `k` that its call has not got."""
    async with running(tmp_path, INDEX) as deltas:
        await deltas.create("a", [1, 0])
        await found(deltas, ["a"], 1, 0)
        ask = (await deltas.topic.link.connection()).call
        with pytest.raises(InvalidArgument, match="limit must be from 1 to 1000") as refused:
            await ask("vector_search", topic="vectors", vector=[1.0, 0.0], limit=limit)
        assert (refused.value.field, refused.value.limit) == ("limit", 1000)
        with pytest.raises(InvalidArgument, match=f"k is {limit}, must be from 1") as refused:
            await deltas.search([1, 0], limit)
        assert (refused.value.field, refused.value.limit) == ("k", 1000)


async def test_a_search_finds_as_many_as_its_answer_holds(tmp_path: Path) -> None:
    """Before, all ten were in one answer of 5 MB."""
    async with running(tmp_path, INDEX) as deltas:
        names = [f"v{number}" for number in range(10)]
        for number, name in enumerate(names):
            await deltas.create(name, [number, 0], metadata={"text": "x" * 500_000})
        await found(deltas, ["v9"], 9, 0)
        neighbours = await deltas.search([0, 0], 10)
        assert [one["vector_id"] for one in neighbours] == names[:6]


def test_what_is_nearer_than_the_end_of_a_cut_list_is_sure() -> None:
    """A node had no room for its third: the other's vector past its second may not be nearest."""

    def told(*distances: float, cut: bool = False) -> dict[str, Any]:
        neighbours = [{"vector_id": f"v{each}", "distance": each} for each in distances]
        return {"neighbours": neighbours, "cut": cut}

    nearest = search_calls._nearest([told(1, 4, cut=True), told(2, 3, 5, 6)], 10)
    assert [one["distance"] for one in nearest] == [1, 2, 3, 4]
    assert len(search_calls._nearest([told(1, 4), told(2, 3, 5, 6)], 10)) == 6
