"""Vectors through the SDK on the real engine: written as deltas, read back out of the log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
import penstock.sync
from penstock import Op, PriorityClass
from penstock.client.delta.deltas import new_delta_id
from penstock.client.delta.writer import DeltaColumns
from penstock.model.delta import Delta

ZEROS = [0.0, 0.0, 0.0, 0.0]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[penstock.Client]:
    async with penstock.connect(tmp_path / "data") as client:
        yield client


@pytest.fixture
async def vectors(client: penstock.Client) -> penstock.Deltas:
    return await client.deltas("vectors", dimensions=4, create=True, origin="w", partitions=3)


async def values_of(vectors: penstock.Deltas, vector_id: str) -> list[float]:
    found = await vectors.get(vector_id)
    assert found is not None
    return [float(value) for value in found.values]


async def some(source: Any, count: int) -> list[penstock.Released]:
    async with asyncio.timeout(60), contextlib.aclosing(source):
        return [await anext(source) for _ in range(count)]


async def test_every_change_is_seen(vectors: penstock.Deltas) -> None:
    await vectors.create("a", [1, 2, 3, 4], metadata={"kind": "x"})
    assert await values_of(vectors, "a") == [1, 2, 3, 4]
    await vectors.set("a", {3: 9, 1: 0.5})
    await vectors.set("a", ([2], [7]))
    assert await values_of(vectors, "a") == [1, 0.5, 7, 9]
    await vectors.scale("a", 2)
    await vectors.offset("a", {0: 1})
    await vectors.offset("a", [1, 1, 1, 1])
    assert await values_of(vectors, "a") == [4, 2, 15, 19]
    await vectors.set_metadata("a", {"kind": "y"})
    found = await vectors.get("a")
    assert found is not None and (found.metadata, found.revision) == ({"kind": "y"}, 7)
    await vectors.replace("a", ZEROS)
    assert await values_of(vectors, "a") == ZEROS
    await vectors.delete("a")
    assert await vectors.get("a") is None
    assert await vectors.get("never") is None


async def test_a_vector_as_of_a_time(vectors: penstock.Deltas) -> None:
    await vectors.create("a", [1, 2, 3, 4])
    await asyncio.sleep(0.005)
    before = datetime.now(UTC)
    await asyncio.sleep(0.005)
    await vectors.set("a", {0: 9})
    old = await vectors.get("a", before)
    assert old is not None and (old.values.tolist(), old.revision) == ([1, 2, 3, 4], 1)
    assert await vectors.get("a", 1) is None


async def test_history_is_in_causal_order(vectors: penstock.Deltas) -> None:
    made = [await vectors.create("a", ZEROS), await vectors.set("a", {0: 1})]
    await vectors.create("b", ZEROS)
    made.append(await vectors.delete("a"))
    history = await vectors.history("a")
    assert [d.delta_id for d in history] == [d.delta_id for d in made]
    assert [d.parent for d in history] == [None, made[0].delta_id, made[1].delta_id]
    assert [d.clock for d in history] == [{"w": 1}, {"w": 2}, {"w": 3}]
    assert await vectors.history("never") == []


async def test_a_writer_that_comes_back_goes_on_where_it_was(tmp_path: Path) -> None:
    for round in range(3):
        async with penstock.connect(tmp_path / "data") as client:
            vectors = client.deltas("v", dimensions=4, create=True, origin="w", partitions=2)
            delta = await vectors.set("a", {round: 1})
            assert delta.clock == {"w": round + 1}
    async with penstock.connect(tmp_path / "data") as client:
        assert await values_of(client.deltas("v"), "a") == [1, 1, 1, 0]


async def test_one_origin_counts_once_however_often_it_is_asked_for(
    client: penstock.Client, vectors: penstock.Deltas
) -> None:
    again = client.deltas("vectors", origin="w", namespace="other")
    assert again is not vectors
    await vectors.create("a", ZEROS)
    delta = await again.set("a", {0: 1}, namespace="default")
    assert delta.clock == {"w": 2}
    assert client.deltas("vectors") is client.deltas("vectors")


async def test_a_second_writer_follows_the_first(client: penstock.Client) -> None:
    first = await client.deltas("v", dimensions=4, create=True, origin="one")
    head = await first.create("a", ZEROS)
    second = client.deltas("v", origin="two")
    delta = await second.set("a", {0: 1})
    assert (delta.parent, delta.clock) == (head.delta_id, {"two": 1, "one": 1})
    assert len(await second.history("a")) == 2


async def test_a_writer_may_name_causes_itself(vectors: penstock.Deltas) -> None:
    root = await vectors.create("a", ZEROS)
    await vectors.set("a", {0: 1})
    other = Delta(
        delta_id=new_delta_id(), namespace="default", vector_id="a", op=Op.SPARSE, origin="x",
        time=root.time + 1, parent=root.delta_id, clock={"x": 1, "w": 1},
        indices=np.array([1]), values=np.array([5.0]),
    )  # fmt: skip
    await vectors.put(other)
    joined = await vectors.set("a", {2: 2}, parent=other.delta_id, clock={"w": 3, "x": 1})
    assert (await vectors.history("a"))[-1] == joined
    assert await values_of(vectors, "a") == [1, 5, 2, 0]


async def test_concurrent_changes_of_one_vector_all_count(vectors: penstock.Deltas) -> None:
    await asyncio.gather(*(vectors.offset("a", {0: 1}) for _ in range(50)))
    found = await vectors.get("a")
    assert found is not None and (found.values[0], found.revision) == (50, 50)


async def test_columns_are_chained_and_partitioned(vectors: penstock.Deltas) -> None:
    ids = [f"v{i % 40}" for i in range(400)]
    values = np.arange(400, dtype=np.float32).reshape(400, 1)
    indices = np.array([[i // 40 % 4] for i in range(400)])
    made = await vectors.put_columns(ids, values, indices=indices, priority=PriorityClass.LOW)
    assert made.shape == (400, 16)
    history = await vectors.history("v7")
    assert [d.delta_id for d in history] == [row.tobytes() for row in made[7::40]]
    assert {d.priority for d in history} == {PriorityClass.LOW}
    assert await values_of(vectors, "v7") == [327, 367, 247, 287]
    delta = await vectors.set("v7", {0: 1})
    assert delta.parent == made[367].tobytes() and delta.clock == {"w": 11}


async def test_fresh_columns_ask_nothing_and_keep_nothing(vectors: penstock.Deltas) -> None:
    await vectors.put_columns(["a", "b", "a"], np.ones((3, 4)), op=Op.CREATE, fresh=True)
    assert len(vectors.heads) == 0
    delta = await vectors.scale("a", 3)
    assert delta.clock == {"w": 3}
    assert await values_of(vectors, "a") == [3, 3, 3, 3]


async def test_many_deltas_as_objects_and_as_columns(vectors: penstock.Deltas) -> None:
    root = await vectors.create("a", ZEROS)
    chain = [
        Delta(delta_id=bytes([i]) * 16, namespace="default", vector_id="a", op=Op.OFFSET,
              origin="w", time=root.time + i, clock={"w": i + 1}, values=np.ones(4))
        for i in range(1, 20)
    ]  # fmt: skip
    assert await vectors.put_many(chain) == 19
    columns = DeltaColumns(vector_ids=["a"], values=np.ones((1, 4), "f4"), op=Op.OFFSET)
    assert await vectors.put_many(columns) == 1
    assert await values_of(vectors, "a") == [20, 20, 20, 20]


async def test_a_refused_change_changes_nothing(vectors: penstock.Deltas) -> None:
    await vectors.create("a", ZEROS)
    for change in (
        vectors.set("a", {4: 1}),
        vectors.set("a", {0: float("nan")}),
        vectors.replace("a", [1, 2]),
        vectors.set_metadata("a", {}, namespace=""),
        vectors.put_columns(["a"], np.ones((1, 1)), indices=[[4]]),
    ):
        with pytest.raises(penstock.InvalidArgument):
            await change
    delta = await vectors.set("a", {0: 1})
    assert delta.clock == {"w": 2}
    assert len(await vectors.history("a")) == 2


async def test_a_delta_that_the_node_refuses_is_not_built_on(vectors: penstock.Deltas) -> None:
    root = await vectors.create("a", ZEROS)
    early = Delta(
        delta_id=new_delta_id(), namespace="default", vector_id="a", op=Op.SCALE, origin="w",
        time=root.time + (3_600_000 << 16), parent=root.delta_id, clock={"w": 2},
        values=np.ones(1),
    )  # fmt: skip
    with pytest.raises(penstock.InvalidArgument) as refused:
        await vectors.put(early)
    assert refused.value.field == "time"
    delta = await vectors.set("a", {0: 1})
    assert (delta.parent, delta.clock) == (root.delta_id, {"w": 2})


async def test_a_subscriber_gets_what_it_asked_for(vectors: penstock.Deltas) -> None:
    for i in range(3):
        await vectors.create(f"v{i}", ZEROS)
        await vectors.set(f"v{i}", {0: i}, namespace="n", headers={"i": i})
    sparse = await some(vectors.subscribe(op=Op.SPARSE), 3)
    assert sorted(r.headers["i"] for r in sparse) == [0, 1, 2]
    spaced = await some(vectors.subscribe(namespace="n"), 3)
    assert {r.delta.op for r in spaced} == {Op.SPARSE}
    [one] = await some(vectors.subscribe(vector_id="v1"), 1)
    assert (one.delta.vector_id, one.delta.op) == ("v1", Op.CREATE)


async def test_a_subscriber_follows_the_log(vectors: penstock.Deltas) -> None:
    await vectors.create("old", ZEROS)
    source = vectors.subscribe(from_sequence="now")
    async with asyncio.timeout(60), contextlib.aclosing(source):
        first = asyncio.ensure_future(anext(source))
        made = [await vectors.set("old", {1: 1})]
        while not first.done():
            made.append(await vectors.set("old", {1: 1}))
        released = await first
    assert released.delta in made
    assert released.sequence == released.position


async def test_an_effect_waits_for_its_cause(vectors: penstock.Deltas) -> None:
    cause, effect = (
        Delta(delta_id=bytes([i]) * 16, namespace="default", vector_id="a", op=Op.OFFSET,
              origin="x", time=i << 16, clock={"x": i}, values=np.ones(4, np.float32),
              parent=None if i == 1 else bytes([i - 1]) * 16)
        for i in (1, 2)
    )  # fmt: skip
    await vectors.put(effect)
    assert await vectors.get("a") is None
    await vectors.put(cause)
    assert await values_of(vectors, "a") == [2, 2, 2, 2]
    first, second = await some(vectors.subscribe(vector_id="a"), 2)
    assert (first.delta, second.delta) == (cause, effect)
    assert first.sequence == first.position == second.position > second.sequence


async def test_a_topic_of_another_kind_is_refused(client: penstock.Client) -> None:
    await client.topic("jobs")
    with pytest.raises(penstock.FailedPrecondition, match="no delta topic"):
        await client.deltas("jobs")
    with pytest.raises(penstock.NotFound):
        await client.deltas("missing")
    await client.deltas("v", dimensions=4, create=True)
    with pytest.raises(penstock.FailedPrecondition, match="4 dimensions"):
        await client.deltas("v", dimensions=5, origin="x")
    with pytest.raises(penstock.InvalidArgument, match="is a delta topic"):
        await client.topic("v").pop()


def test_the_same_without_async(tmp_path: Path) -> None:
    with penstock.sync.connect(tmp_path / "data") as client:
        vectors = client.deltas("v", dimensions=4, create=True, origin="w")
        vectors.create("a", [1, 2, 3, 4])
        vectors.set("a", {0: 5})
        vectors.put_columns(["b"], np.ones((1, 4)))
        found = vectors.get("a")
        assert found is not None and found.values.tolist() == [5, 2, 3, 4]
        assert [d.op for d in vectors.history("a")] == [Op.CREATE, Op.SPARSE]
        seen = vectors.subscribe(vector_id="a")
        assert next(seen).delta.op is Op.CREATE
        seen.close()
        assert (vectors.name, vectors.origin, vectors.dimensions) == ("v", "w", 4)
