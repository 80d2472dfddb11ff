"""What a producer sees of a full queue: an answer at once, or after the time that it gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.test_engine_ingest import until

import penstock
from penstock.client.options import Options
from penstock.config import Config
from penstock.errors import Backpressure
from penstock.node.serve.topic import ServedTopic
from penstock.node.session.session import listen
from penstock.propagation.options import LiveOptions
from penstock.server.embedded import open_embedded


@dataclass
class Place:
    vectors: penstock.Deltas
    topic: ServedTopic
    room: int = 0

    @property
    def depth(self) -> int:
        assert self.topic.ingest is not None
        return self.topic.ingest.queue.depth


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    """A node of which ten deltas may wait, with a live path that stands still."""
    path = tmp_path / "data"
    node = await open_embedded(path, config=Config(data=path, live=LiveOptions(ingest_max=10)))
    server = await listen(node.engine, host="127.0.0.1", port=0, tls=None)
    url = f"penstock://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with penstock.connect(url, options=Options(retry_s=60)) as client:
        vectors = await client.deltas("vectors", dimensions=2, create=True, partitions=1)
        place = Place(vectors, node.engine.topics["vectors"])
        place.topic.live_room = lambda: place.room
        yield place
        place.room = 1000
    server.close()
    await node.close()


def filling(place: Place) -> list[asyncio.Task[penstock.Delta]]:
    """Ten changes that wait at the node."""
    return [
        asyncio.create_task(place.vectors.create(f"v{i}", [i, i], timeout=0)) for i in range(10)
    ]


async def test_a_try_is_refused_at_once_and_nothing_is_lost(place: Place) -> None:
    waiting = filling(place)
    await until(lambda: place.depth == 10)
    for put in (
        place.vectors.create("late", [1, 2], timeout=0),
        place.vectors.put_columns(["late"], [[1.0, 2.0]], timeout=0, fresh=True),
    ):
        with pytest.raises(Backpressure):
            await put
    place.room = 1000
    await asyncio.gather(*waiting)
    await place.vectors.create("late", [1, 2], timeout=0)
    assert [(await place.vectors.get(f"v{i}")).values[0] for i in range(10)] == list(range(10))


async def test_a_put_waits_for_room_as_long_as_it_may(place: Place) -> None:
    waiting = filling(place)
    await until(lambda: place.depth == 10)
    with pytest.raises(Backpressure) as refused:
        await place.vectors.create("late", [1, 2], timeout=0.05)
    assert 0 < refused.value.retry_after_s <= 5
    patient = asyncio.create_task(place.vectors.create("late", [3, 4], timeout=60))
    forever = asyncio.create_task(place.vectors.create("last", [5, 6]))
    await asyncio.sleep(0.05)
    assert not patient.done()
    place.room = 1000
    await asyncio.gather(*waiting, patient, forever)
    found = [(await place.vectors.get(name)).values.tolist() for name in ("late", "last")]
    assert found == [[3, 4], [5, 6]]


async def test_a_client_that_is_full_itself_says_so(place: Place) -> None:
    waiting = filling(place)
    await until(lambda: place.depth == 10)
    producer = await place.vectors.topic.open_producer()
    producer.inflight_entries += 1 << 30
    with pytest.raises(Backpressure, match="under way"):
        await place.vectors.create("late", [1, 2], timeout=0)
    producer.inflight_entries -= 1 << 30
    place.room = 1000
    await asyncio.gather(*waiting)


async def test_what_follows_a_refused_change_is_refused_with_it(place: Place) -> None:
    place.room = 1000
    await place.vectors.create("one", [0, 0])
    place.room = 0
    waiting = filling(place)
    await until(lambda: place.depth == 10)
    tried = asyncio.create_task(place.vectors.set("one", {0: 1}, timeout=0.05))
    then = asyncio.create_task(place.vectors.set("one", {1: 2}))
    last = asyncio.create_task(place.vectors.put_columns(["one", "two"], [[3.0, 3.0]] * 2))
    with pytest.raises(Backpressure):
        await tried
    new = asyncio.create_task(place.vectors.set("one", {1: 4}))  # waits for these to end
    place.room = 1000
    await asyncio.gather(*waiting)
    for late in (then, last):
        with pytest.raises(Backpressure):
            await late
    await new
    await place.vectors.set("one", {0: 5})
    found = await place.vectors.get("one")
    assert found is not None
    assert found.values.tolist() == [5, 4]
    history = await place.vectors.history("one")
    assert [delta.clock[delta.origin] for delta in history] == [1, 2, 3]
