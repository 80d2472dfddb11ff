"""The sinks that must all behave alike, each on the real thing. A new one joins by a class here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import pyarrow as pa
import pytest
from redis import Redis
from tests.conformance.sinks.changes import (
    DIMENSIONS,
    PIPELINE,
    Effect,
    State,
    delta,
    deltas,
    held,
    opened,
    states,
)
from tests.s3 import make_bucket, s3_server
from tests.spark.conftest import RunningNode

from penstock.model.delta import decode
from penstock.sinks.cache import CacheSink
from penstock.sinks.index import IndexSink
from penstock.sinks.lake import LakeSink
from penstock.sinks.memory_index import MemoryIndexSink
from penstock.sinks.protocol import Sink
from penstock.sinks.topics import NotifySink, RemoteSink
from penstock.spark.source.access import NodeAccess, NodeTopicWriter
from penstock.testing.redis import RedisProcess


class Place(Protocol):
    """Where a kind of sink writes to. Everything it ever took is found there again."""

    def sink(self) -> Sink:
        """A sink on this place, not yet opened, as after a restart."""
        ...

    def effect(self) -> Effect:
        """Everything that can be seen there, in an order of its own."""
        ...


class LakePlace:
    def __init__(self, path: str, *, storage: dict[str, str] | None = None) -> None:
        self._path, self._storage = path, storage

    def sink(self) -> LakeSink:
        options = self._storage
        return LakeSink("lake", path=self._path, pipeline=PIPELINE, storage_options=options)

    def effect(self) -> Effect:
        with opened(self.sink()) as sink:
            assert isinstance(sink, LakeSink)
            history = sink.history.batches(["topic", "partition", "ordinal", "delta_id"])
            return [*held(sink), *rows_of(history)]


class IndexPlace:
    def __init__(
        self, path: str, *, shards: int = 1, storage: dict[str, str] | None = None
    ) -> None:
        self._path, self._shards, self._storage = path, shards, storage

    def sink(self) -> IndexSink:
        return IndexSink(
            "index",
            path=self._path,
            pipeline=PIPELINE,
            shards=self._shards,
            storage_options=self._storage,
        )

    def effect(self) -> Effect:
        with opened(self.sink()) as sink:
            return held(sink)

    def bad(self) -> pa.Table:
        return with_infinite()


class MemoryPlace:
    """The process itself is the place: a restart within it finds the sink as it was."""

    def __init__(self) -> None:
        self._sink = MemoryIndexSink("memory")

    def sink(self) -> MemoryIndexSink:
        return self._sink

    def effect(self) -> Effect:
        return held(self._sink)

    def bad(self) -> pa.Table:
        return with_infinite()


def with_infinite() -> pa.Table:
    """A table whose row 1 no index can ever take."""
    infinite = (1.0, float("inf"), 0.0, 0.0)
    return states(
        State(vector_id="a", revision=1),
        State(vector_id="b", revision=1, values=infinite),
        State(vector_id="c", revision=1),
    )


class CachePlace:
    def __init__(self, server: RedisProcess) -> None:
        self._url = server.url

    def sink(self) -> CacheSink:
        return CacheSink("cache", url=self._url, pipeline=PIPELINE)

    def effect(self) -> Effect:
        with opened(self.sink()) as sink:
            return held(sink)


class ClusterPlace(CachePlace):
    def sink(self) -> CacheSink:
        return CacheSink("cache", url=self._url, pipeline=PIPELINE, cluster=True)


@contextmanager
def redis_cluster(folder: Path) -> Iterator[RedisProcess]:
    """The first of three servers that share all slots."""
    with ExitStack() as stack:
        nodes = [RedisProcess(folder / str(n), durable=False, cluster=True) for n in range(3)]
        for number, node in enumerate(nodes):
            stack.enter_context(node)
            first, end = (SLOTS * n // len(nodes) for n in (number, number + 1))
            with closing(Redis.from_url(node.url)) as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
                meet = ("CLUSTER MEET", "127.0.0.1", nodes[0].port, nodes[0].bus_port)
                client.execute_command(*meet)
        deadline = time.monotonic() + 60
        while any(b"state:ok" not in _cluster_info(node) for node in nodes):
            assert time.monotonic() < deadline, "the cluster does not come together"
            time.sleep(0.05)
        yield nodes[0]


def _cluster_info(node: RedisProcess) -> bytes:
    with closing(Redis.from_url(node.url)) as client:
        found = client.execute_command("CLUSTER INFO")
    return str(found).replace("': '", ":").encode()


class RemotePlace:
    """Two source topics' worth of partitions into a delta topic with three partitions."""

    def __init__(self, node: RunningNode) -> None:
        self._node = node
        config = {"name": "copy", "kind": "delta", "dimensions": DIMENSIONS, "partitions": 3}
        node.access().call("topic_create", config=config)

    def sink(self) -> RemoteSink:
        return RemoteSink("remote", writer=NodeTopicWriter(self._node.access), topic="copy")

    def effect(self) -> Effect:
        return sorted(decode(payload).delta_id for payload in payloads(self._node, "copy"))

    def bad(self) -> pa.Table:
        good = deltas(1, delta(1), delta(2), delta(3))
        broken = [*good["payload"].to_pylist()]
        broken[1] = broken[1][:-1] + b"\xff"  # not the name that its hash was made of
        at = good.schema.get_field_index("payload")
        return good.set_column(at, good.schema.field(at), pa.array(broken, pa.binary()))


class NotifyPlace:
    def __init__(self, node: RunningNode) -> None:
        self._node = node
        node.topic("vectors-changes", [], payload_bytes_max=400, partitions=2)

    def sink(self) -> NotifySink:
        return NotifySink("notify", writer=NodeTopicWriter(self._node.access))

    def effect(self) -> Effect:
        found = map(msgspec.msgpack.decode, payloads(self._node, "vectors-changes"))
        return sorted((notice["partition"], notice["ordinal"]) for notice in found)

    def bad(self) -> pa.Table:
        return deltas(1, delta(1), delta(2, vector_id="long" * 100), delta(3))


def payloads(node: RunningNode, topic: str) -> Iterator[bytes]:
    access = node.access()
    for partition, status in enumerate(access.log_status(topic)):
        for batches in access.read_range(topic, partition, 1, status.readable):
            for batch in batches:
                yield from batch.columns().binary("payload") or ()


def rows_of(batches: Iterator[pa.RecordBatch]) -> Effect:
    return sorted(tuple(row.values()) for batch in batches for row in batch.to_pylist())


SLOTS = 16384
MARKED = ("cache", "cluster", "index", "index-s3", "lake", "lake-s3", "shards")
WITH_STATE = (*MARKED, "memory")
WITHOUT = ("notify", "remote")
REFUSING = ("index", "memory", "notify", "remote", "shards")


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as options:
        yield options


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("redis"), durable=False) as server:
        yield server


def _place(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        if kind.endswith("-s3"):
            options = request.getfixturevalue("s3")
            made = LakePlace if kind == "lake-s3" else IndexPlace
            yield made(f"s3://{make_bucket(options)}/sink", storage=options)
        elif kind == "lake":
            yield LakePlace(str(folder / "lake"))
        elif kind in ("index", "shards"):
            yield IndexPlace(str(folder / "index"), shards=1 if kind == "index" else 4)
        elif kind == "memory":
            yield MemoryPlace()
        elif kind == "cache":
            place = CachePlace(request.getfixturevalue("redis_server"))
            with opened(place.sink()) as sink:
                sink.reset()
            yield place
        elif kind == "cluster":
            yield ClusterPlace(stack.enter_context(redis_cluster(folder / "redis")))
        else:
            node = RunningNode(folder / "node")
            stack.callback(node.close)
            stack.callback(NodeAccess.close_shared)
            yield RemotePlace(node) if kind == "remote" else NotifyPlace(node)


@pytest.fixture(params=[*WITH_STATE, *WITHOUT])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _place(request.param, request, tmp_path)


@pytest.fixture(params=WITH_STATE)
def with_state(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _place(request.param, request, tmp_path)


@pytest.fixture(params=WITHOUT)
def without(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _place(request.param, request, tmp_path)


@pytest.fixture(params=[*MARKED, *WITHOUT])
def in_tasks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _place(request.param, request, tmp_path)


@pytest.fixture(params=MARKED)
def marked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _place(request.param, request, tmp_path)


@pytest.fixture(params=REFUSING)
def refusing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from _place(request.param, request, tmp_path)
