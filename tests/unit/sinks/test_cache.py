"""Vectors in a real Redis."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.conformance.sinks.changes import State, held, opened, states, work

from penstock.errors import Corruption, InvalidArgument, Unavailable
from penstock.sinks.cache import KEYS_PER_CALL, CacheSink, decode
from penstock.sinks.protocol import SinkCommit
from penstock.testing.redis import RedisProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("redis"), durable=False) as server:
        yield server


@pytest.fixture
def cache(server: RedisProcess) -> Iterator[CacheSink]:
    sink = CacheSink("cache", url=server.url, prefix="p*")
    sink.open()
    sink.client.flushall()
    yield sink
    sink.close()


def test_a_vector_is_read_in_one_go(cache: CacheSink) -> None:
    rows = [State(vector_id="a", revision=7, values=(0.5, -0.0, 1, 2), metadata={"n": [1]})]
    cache.write(work(0, states(*rows, State(vector_id="b", revision=1, namespace="x:y"))))
    found = cache.get("a")
    assert found is not None
    assert found.values.tobytes() == np.array([0.5, -0.0, 1, 2], np.float32).tobytes()
    assert (found.revision, found.metadata) == (7, {"n": [1]})
    many = cache.get_many(["a", "b", "c"], namespace="x:y")
    assert [one and one.metadata for one in many] == [None, None, None]
    assert many[1] is not None


def test_more_vectors_than_one_call_takes(cache: CacheSink) -> None:
    count = KEYS_PER_CALL * 21 + 7
    rows = [
        State(
            vector_id=f"v{i}",
            revision=i + 1,
            values=(i, 0, 0, 0),
            metadata={"i": i} if i % 3 else None,
        )
        for i in range(count)
    ]
    cache.write(work(0, states(*rows).slice(5)))
    found = held(cache)
    assert len(found) == count - 5
    for at in (5, KEYS_PER_CALL + 1, count - 1):
        one = cache.get(f"v{at}")
        assert one is not None
        assert (one.revision, one.values[0]) == (at + 1, at)
        assert one.metadata == ({"i": at} if at % 3 else None)


def test_a_tombstone_does_not_live_for_ever(cache: CacheSink) -> None:
    cache.write(work(0, states(State(vector_id="a", revision=1))))
    assert cache.client.pttl(cache.key("default", "a")) == -1
    cache.write(work(1, states(State(vector_id="a", revision=2, deleted=True))))
    assert cache.get("a") is None
    assert 0 < cache.client.pttl(cache.key("default", "a")) <= 24 * 3600 * 1000
    cache.write(work(2, states(State(vector_id="a", revision=3))))
    assert cache.client.pttl(cache.key("default", "a")) == -1


def test_a_server_that_forgot_the_script_is_told_again(cache: CacheSink) -> None:
    cache.client.script_flush()
    cache.write(work(0, states(State(vector_id="a", revision=1))))
    assert cache.get("a") is not None


def test_reset_leaves_other_keys_alone(cache: CacheSink, server: RedisProcess) -> None:
    other = CacheSink("other", url=server.url, prefix="pq")
    other.open()
    other.write(work(0, states(State(vector_id="a", revision=1))))
    cache.write(work(0, states(State(vector_id="a", revision=1))))
    cache.reset()
    assert (held(cache), len(held(other))) == ([], 1)
    other.close()


def test_a_value_that_is_none_of_ours_is_corruption(cache: CacheSink) -> None:
    cache.client.set(cache.key("default", "a"), b"text")
    with pytest.raises(Corruption):
        cache.get("a")
    cache.write(work(0, states(State(vector_id="a", revision=1))))
    whole = cache.client.get(cache.key("default", "a"))
    assert isinstance(whole, bytes)
    with pytest.raises(Corruption):
        decode(whole[:-1])


def test_a_server_that_is_gone_is_unavailable(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as server:
        sink = CacheSink("cache", url=server.url.replace("//", "//:secret@"), timeout_s=2)
        sink.open()
        sink.write(work(0, states(State(vector_id="a", revision=1))))
        server.kill()
        with pytest.raises(Unavailable) as refused:
            sink.write(work(1, states(State(vector_id="a", revision=2))))
        assert "secret" not in refused.value.message
        server.start()
        sink.write(work(1, states(State(vector_id="a", revision=2))))
        found = sink.get("a")
        assert found is not None
        assert found.revision == 2
        sink.close()


def test_bad_options_are_named() -> None:
    for options, field in (
        ({"prefix": "a:b"}, "prefix"),
        ({"tombstone_hours": 0.0}, "tombstone_hours"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            CacheSink("cache", url="redis://127.0.0.1", **options)  # type: ignore[arg-type]
        assert refused.value.field == field
    with pytest.raises(InvalidArgument):
        CacheSink("cache", url="http://127.0.0.1").open()


def test_a_mark_is_written_only_where_the_last_one_still_is(server: RedisProcess) -> None:
    with opened(CacheSink("cache", url=server.url, pipeline="p")) as sink:
        assert isinstance(sink, CacheSink)
        first, second = (
            SinkCommit(pipeline="p", first=n, last=n, position=(n,), claim=1, incarnation="i")
            for n in range(2)
        )
        sink.commit([], first)
        assert sink.mark() == first.mark
        after = replace(second, after=first.mark)
        for _ in range(2):
            sink.commit([], after)
            assert sink.mark() == second.mark
        sink.client.flushall()
        with pytest.raises(Unavailable, match="no longer has the mark"):
            sink.commit([], after)
        assert sink.mark() is None
