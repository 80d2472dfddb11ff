"""Delivery into the real things: a Delta lake, a Redis server that dies, topics of a real node."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spark.conftest import RunningNode
from tests.unit.spark.delivery.delivering import FileSink, Triggers, delivery_of, eventually

from penstock.model.delta import decode
from penstock.sinks.cache import CacheSink
from penstock.sinks.lake import LakeSink
from penstock.spark.delivery.attachment import RoutedSink, letter_box
from penstock.spark.delivery.delivery import PipelineDelivery
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import Connecting
from penstock.testing.redis import RedisProcess


@pytest.fixture
def triggers(tmp_path: Path) -> Triggers:
    return Triggers(tmp_path)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    running = RunningNode(tmp_path / "node")
    yield running
    NodeAccess.close_shared()
    running.close()


def test_a_lake_goes_on_from_its_own_cursor(triggers: Triggers, tmp_path: Path) -> None:
    for vector in "abc":
        triggers.commit((vector, 1), ("shared", triggers.ordinal + 1))
        lake = LakeSink("lake", path=str(tmp_path / "lake"), pipeline="p-0123456789ab")
        delivery = delivery_of(triggers, lake, folder=tmp_path)
        delivery.start()
        assert delivery.drain(20)
        delivery.stop()
        (tmp_path / "sinks" / "00000000-lake.json").unlink()  # the file is lost, the lake knows
    lake.open()
    history = lake.history.batches(["ordinal"])
    ordinals = [ordinal for batch in history for ordinal in batch["ordinal"].to_pylist()]
    found = {row["vector_id"]: row["revision"] for b in lake.scan() for row in b.to_pylist()}
    lake.close()
    assert sorted(ordinals) == [1, 2, 3, 4, 5, 6]
    assert found == {"a": 1, "b": 1, "c": 1, "shared": 5}


def test_a_cache_whose_server_died_catches_up(
    triggers: Triggers, redis: RedisProcess, tmp_path: Path
) -> None:
    triggers.commit(("a", 1))
    cache, other = CacheSink("cache", url=redis.url), FileSink(tmp_path)
    delivery = delivery_of(triggers, cache, other, folder=tmp_path)
    delivery.start()
    assert delivery.drain(20)
    redis.kill()
    for revision in range(2, 6):
        triggers.commit(("a", revision), (f"b{revision}", 1))
    eventually(lambda: delivery.workers[1].caught_up(4))
    eventually(lambda: delivery.workers[0].runner.meter.failures > 0)
    assert not delivery.workers[0].caught_up(4)
    redis.start()
    delivery.workers[0].runner.retry._open_until -= 30  # should it be open by now
    assert delivery.drain(20)
    delivery.stop()
    cache.open()
    found = [cache.get(name) for name in ("a", "b2", "b5")]
    cache.close()
    assert [vector.revision for vector in found if vector is not None] == [5, 1, 1]


def test_letters_reach_topics_that_a_node_makes_for_them(
    triggers: Triggers, node: RunningNode, tmp_path: Path
) -> None:
    triggers.commit(("a", 1), ("bad", 1, 0), quarantine=["orphan"])
    box = letter_box(Connecting(url=node.url))
    for _ in range(2):  # the second time everything is a repetition
        sink = FileSink(tmp_path, rejects=["bad"])
        delivery = PipelineDelivery(
            triggers.log, [RoutedSink(sink=sink)], pipeline="p", letters=box
        )
        delivery.start()
        assert delivery.drain(20)
        delivery.stop()
        for cursor in (tmp_path / "sinks").iterdir():
            cursor.unlink()
    for topic, name in (("vectors-dlq-file", "bad"), ("vectors-quarantine", "orphan")):
        (found,) = node.client.topic(topic).pop(10)
        assert decode(found.value).vector_id == name
        assert found.headers["penstock-topic"] == "vectors"
