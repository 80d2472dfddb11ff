"""Subscribing to deltas through the SDK: live, from the past, with a cursor, through failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import pytest

import penstock
import penstock.sync
from penstock import Op, PriorityClass
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.delta import encode
from penstock.model.plain import UNREADABLE
from penstock.node.engine import Engine
from penstock.node.session.session import listen, port_of
from penstock.server.embedded import open_embedded
from verification.malformed_maps import MALFORMED_MAPS

ZEROS = [0.0, 0.0, 0.0, 0.0]


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    node = await open_embedded(tmp_path / "data")
    yield node.engine
    await node.close()


@pytest.fixture
async def vectors(engine: Engine) -> AsyncIterator[penstock.Deltas]:
    """Over a real socket."""
    server = await listen(engine, host="127.0.0.1", port=0, tls=None)
    options = penstock.Options(retry_wait_s=0.01)
    async with asyncio.timeout(120):
        async with penstock.connect(
            f"penstock://127.0.0.1:{port_of(server)}", options=options
        ) as client:
            yield await client.deltas("v", dimensions=4, create=True, origin="w", partitions=3)
    server.close()


async def some(source: Any, count: int) -> list[Any]:
    async with contextlib.aclosing(source):
        return [await anext(source) for _ in range(count)]


async def fill(vectors: penstock.Deltas, names: range) -> None:
    await vectors.put_columns([f"v{i}" for i in names], np.ones((len(names), 4)))


async def opened(engine: Engine, count: int = 3) -> None:
    """Until so many partitions are subscribed to."""
    while (live := engine.topics["v"].live) is None or live.subscribers < count:
        await asyncio.sleep(0.001)


def ids(found: list[penstock.Released]) -> list[str]:
    return sorted(released.delta.vector_id for released in found)


async def test_all_of_the_past_then_what_comes(vectors: penstock.Deltas) -> None:
    await fill(vectors, range(300))
    source = vectors.subscribe()
    past = [await anext(source) for _ in range(300)]
    await fill(vectors, range(300, 310))
    new = await some(source, 10)
    assert ids(past + new) == sorted(f"v{i}" for i in range(310))
    for partition in range(3):
        ordinals = [r.ordinal for r in past + new if r.partition == partition]
        assert ordinals == list(range(1, len(ordinals) + 1))


async def test_a_lost_connection_leaves_no_gap(vectors: penstock.Deltas, engine: Engine) -> None:
    source = vectors.subscribe(credits=50)
    await fill(vectors, range(200))
    seen = [await anext(source) for _ in range(20)]
    for part in range(2, 5):
        for session in list(engine.connections):
            session.shut("a test")
        await fill(vectors, range(100 * part, 100 * part + 100))
        seen += [await anext(source) for _ in range(60)]
    seen += await some(source, 500 - len(seen))
    assert ids(seen) == sorted(f"v{i}" for i in range(500))


async def test_a_cursor_goes_on_where_the_reader_stopped(vectors: penstock.Deltas) -> None:
    await fill(vectors, range(30))
    first = await some(vectors.subscribe(cursor="index"), 12)
    # the last one was taken, and nobody knows whether it was handled
    second = await some(vectors.subscribe(cursor="index"), 19)
    assert ids(first[:-1] + second) == sorted(f"v{i}" for i in range(30))
    third = await some(vectors.subscribe(cursor="index"), 1)
    assert third[0].delta == second[-1].delta


async def test_a_batch_may_be_acknowledged_by_hand(vectors: penstock.Deltas) -> None:
    await fill(vectors, range(30))
    source, seen = vectors.subscribe_batches(cursor="c"), 0
    async with contextlib.aclosing(source):
        while seen < 30:
            batch = await anext(source)
            seen += len(batch)
            batch.ack()
    await vectors.create("new", ZEROS)
    [one] = await some(vectors.subscribe(cursor="c"), 1)
    assert one.delta.vector_id == "new"


async def test_a_reader_may_know_better_than_its_cursor(vectors: penstock.Deltas) -> None:
    await fill(vectors, range(30))
    await some(vectors.subscribe(cursor="c"), 30)
    await vectors.create("new", ZEROS)
    found = await some(vectors.subscribe(cursor="c", positions=dict.fromkeys(range(3), 0)), 31)
    assert ids(found) == sorted(["new", *(f"v{i}" for i in range(30))])
    last = await some(vectors.subscribe(cursor="c"), 1)
    assert last[0].delta == found[-1].delta, "the cursor goes on with it"


async def test_a_new_cursor_begins_where_it_is_told(
    vectors: penstock.Deltas, engine: Engine
) -> None:
    await vectors.create("old", ZEROS)
    source = vectors.subscribe(cursor="late", from_sequence="now")
    first = asyncio.ensure_future(anext(source))
    await opened(engine)
    await vectors.create("new", ZEROS)
    assert (await first).delta.vector_id == "new"
    await source.aclose()


async def test_from_a_time_on(vectors: penstock.Deltas) -> None:
    await vectors.create("a", ZEROS)
    await asyncio.sleep(0.005)
    since = datetime.now(UTC)
    await asyncio.sleep(0.005)
    await vectors.create("b", ZEROS)
    [one] = await some(vectors.subscribe(from_time=since), 1)
    assert one.delta.vector_id == "b"
    [named] = await some(vectors.subscribe(from_time=since, cursor="t"), 1)
    assert named.delta.vector_id == "b"


async def test_known_positions_come_before_any_other_start(vectors: penstock.Deltas) -> None:
    await fill(vectors, range(60))
    source, reached = vectors.subscribe_batches(), dict[int, int]()
    async with contextlib.aclosing(source):
        while len(reached) < 3 or sum(reached.values()) < 60:
            batch = await anext(source)
            reached[batch.partition] = batch.position
    await vectors.create("new", ZEROS)
    for start in ({}, {"from_time": 1}, {"from_sequence": 1}):
        [one] = await some(vectors.subscribe(positions=reached, **start), 1)
        assert one.delta.vector_id == "new"
    with pytest.raises(penstock.InvalidArgument, match="negative") as refused:
        await anext(vectors.subscribe(positions={0: -1}))
    assert refused.value.field == "positions"


async def test_routes_and_conditions_go_together(vectors: penstock.Deltas) -> None:
    for name in ("x", "y/z"):
        await vectors.create("a", ZEROS, namespace=name, headers={"team": name})
        await vectors.set("a", {0: 1}, namespace=name, headers={"team": name})
    wanted = {
        "any route": ({"routes": ["namespace=x", "op=SPARSE"]}, 3),
        "routes and op": ({"routes": ["header:team=x", "namespace=y/z"], "op": Op.SPARSE}, 2),
        "namespace and op": ({"namespace": "x", "op": Op.CREATE}, 1),
        "a slash": ({"namespace": "y/z", "vector_id": "a", "op": Op.CREATE}, 1),
        "route and vector": ({"routes": ["op=CREATE"], "namespace": "x", "vector_id": "a"}, 1),
    }
    await vectors.create("end", ZEROS)
    for name, (what, count) in wanted.items():
        found = await some(vectors.subscribe(**what), count)
        assert len({(r.delta.namespace, r.delta.op) for r in found}) == count, name


async def test_a_batch_is_columns(vectors: penstock.Deltas) -> None:
    await fill(vectors, range(50))
    source, rows = vectors.subscribe_batches(), 0
    async with contextlib.aclosing(source):
        while rows < 50:
            batch = await anext(source)
            rows += len(batch)
            assert batch.positions.tolist() == [r.position for r in batch]
            assert batch.sequences.tolist() == [r.sequence for r in batch]
            assert len(batch.payloads) == len(batch.ordinals) == len(batch.times_ms) == len(batch)
            assert batch[0].partition == batch.partition
            assert batch.position <= batch.sequence_committed and batch.folded == 0


async def test_changes_of_a_vector_are_coalesced(vectors: penstock.Deltas, engine: Engine) -> None:
    await vectors.create("a", ZEROS)
    source = vectors.subscribe(from_sequence="now", coalesce_ms=300)
    first = asyncio.ensure_future(anext(source))
    await opened(engine)
    for i in range(10):
        await vectors.set("a", {i % 4: i})
    components: dict[int, float] = {}
    found = [await first]
    while components != {0: 8, 1: 9, 2: 6, 3: 7}:
        delta = found[-1].delta
        assert delta.indices is not None and delta.values is not None
        components |= dict(zip(delta.indices.tolist(), delta.values.tolist(), strict=True))
        if components != {0: 8, 1: 9, 2: 6, 3: 7}:
            found.append(await anext(source))
    assert len(found) < 10
    await source.aclose()


async def test_what_is_coalesced_survives_a_lost_connection(
    vectors: penstock.Deltas, engine: Engine
) -> None:
    names = [f"v{i}" for i in range(30)]
    source = vectors.subscribe_batches(from_sequence="now", coalesce_ms=300, credits=3)
    batch = asyncio.ensure_future(anext(source))
    await opened(engine)
    for component in range(4):
        await vectors.put_columns(
            names, np.full((30, 1), component + 1), indices=np.full((30, 1), component)
        )
    found, folded, ends = dict[str, dict[int, float]](), 0, {f"end{i}" for i in range(30)}
    await vectors.put_columns(sorted(ends), np.zeros((30, 1)), indices=np.zeros((30, 1)))
    while not ends <= found.keys():
        folded += (await batch).folded
        for released in await batch:
            delta = released.delta
            assert delta.indices is not None and delta.values is not None
            heard = zip(delta.indices.tolist(), delta.values.tolist(), strict=True)
            found.setdefault(delta.vector_id, {}).update(heard)
        for session in list(engine.connections):
            session.shut("a test")
        batch = asyncio.ensure_future(anext(source))
    batch.cancel()
    assert {name: found.get(name) for name in names} == {
        name: {0: 1, 1: 2, 2: 3, 3: 4} for name in names
    }
    assert folded


async def test_an_urgent_delta_keeps_its_class(vectors: penstock.Deltas) -> None:
    await vectors.create("a", ZEROS, priority=PriorityClass.CRITICAL)
    [one] = await some(vectors.subscribe(), 1)
    assert one.delta.priority is PriorityClass.CRITICAL


async def test_what_is_not_possible_is_said(vectors: penstock.Deltas) -> None:
    with pytest.raises(penstock.InvalidArgument, match="route"):
        await anext(vectors.subscribe(routes=["nonsense"]))
    with pytest.raises(penstock.InvalidArgument, match="credit_entries"):
        await anext(vectors.subscribe(credits=0))
    with pytest.raises(penstock.InvalidArgument, match="negative"):
        await anext(vectors.subscribe(from_sequence=-1))
    with pytest.raises(penstock.InvalidArgument, match="sinks") as refused:
        await anext(vectors.subscribe(cursor="sink-memory"))
    assert refused.value.field == "cursor"


def test_the_same_without_async(tmp_path: Path) -> None:
    with penstock.sync.connect(tmp_path / "data") as client:
        vectors = client.deltas("v", dimensions=4, create=True, origin="w")
        for i in range(5):
            vectors.create(f"v{i}", ZEROS)
        batches = vectors.subscribe_batches(cursor="c")
        seen = 0
        while seen < 5:
            batch = next(batches)
            seen += len(batch)
            assert batch.positions.tolist() == [released.position for released in batch]
            batch.ack()
        batches.close()
        vectors.create("new", ZEROS)
        assert next(vectors.subscribe(cursor="c")).delta.vector_id == "new"


async def test_headers_that_cannot_be_read_do_not_end_a_subscription(
    vectors: penstock.Deltas, engine: Engine
) -> None:
    """They are in a log from before they were checked. Before, the subscriber got an error there
    and nothing that followed."""
    headers = list(MALFORMED_MAPS.values())
    partition = engine.topics["v"].here(0)
    await vectors.create("a", ZEROS)
    [one] = await some(vectors.subscribe(), 1)
    payloads = [
        encode(
            msgspec.structs.replace(one.delta, delta_id=uuid4().bytes, vector_id=f"b{i}"),
            dimensions=4,
        )
        for i in range(len(headers))
    ]
    packed = SCHEMAS[Kind.ENQ].encode(len(headers), {"headers": headers, "payload": payloads})
    batch = partition.append(Kind.ENQ, packed, len(headers))
    engine.topics["v"].wake()
    await partition.committed(batch.last)
    routed = vectors.subscribe(routes=["header:a=b"])
    found = await some(vectors.subscribe(), len(headers) + 1)
    told = [set(r.headers) for r in found if r.delta.vector_id != "a"]
    assert told == [{UNREADABLE}] * len(headers)
    await vectors.create("c", ZEROS, headers={"a": "b"})
    assert [r.delta.vector_id for r in await some(routed, 1)] == ["c"]
