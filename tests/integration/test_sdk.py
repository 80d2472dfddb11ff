"""The SDK on the real engine: embedded in a folder, and over TCP and TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

import penstock
import penstock.sync
from penstock.model.batch import Kind
from penstock.model.ids import MessageId
from penstock.node.session.session import listen, port_of
from penstock.server.embedded import EmbeddedNode, open_embedded


class Job(msgspec.Struct):
    name: str
    size: int = 1


@asynccontextmanager
async def listening(
    folder: Path, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[EmbeddedNode, str]]:
    node = await open_embedded(folder)
    server = await listen(node.engine, host="127.0.0.1", port=0, tls=tls)
    scheme = "penstocks" if tls else "penstock"
    try:
        yield node, f"{scheme}://localhost:{port_of(server)}"
    finally:
        server.close()
        await node.close()


@pytest.fixture(params=["embedded", "tcp"])
async def client(request: Any, tmp_path: Path) -> AsyncIterator[penstock.Client]:
    if request.param == "embedded":
        async with penstock.connect(tmp_path / "data") as client:
            yield client
        return
    async with listening(tmp_path / "data") as (_, url), penstock.connect(url) as client:
        yield client


async def drained(topic: penstock.Topic[Any], count: int, **how: Any) -> list[Any]:
    seen: list[Any] = []
    async for message in topic.consume(**how):
        async with message:
            seen.append(message.value)
        if len(seen) == count:
            break
    return seen


@pytest.mark.parametrize(("mode", "expected"), [("min", [1, 2, 3]), ("max", [3, 2, 1])])
async def test_messages_come_by_priority(
    client: penstock.Client, mode: str, expected: list[int]
) -> None:
    topic = await client.topic("jobs", of=Job, mode=mode)
    for size in (2, 3, 1):
        await topic.put(Job("x", size), priority=size)
    assert [job.size for job in await drained(topic, 3)] == expected
    stats = await topic.stats()
    assert (stats.enqueued_total, stats.acked_total, stats.backlog) == (3, 3, 0)


async def test_many_concurrent_puts_each_get_their_own_id(client: penstock.Client) -> None:
    topic = await client.topic("jobs", partitions=3)
    ids = await asyncio.gather(*(topic.put(b"%d" % i, key=str(i)) for i in range(500)))
    assert len(set(ids)) == 500
    seen = set()
    async for batch in topic.consume_batches(100):
        seen |= set(batch.payloads)
        await batch.ack()
        if len(seen) == 500:
            break
    assert seen == {b"%d" % i for i in range(500)}


async def test_an_atomic_batch_over_partitions_is_read_from_every_log(
    client: penstock.Client,
) -> None:
    topic = await client.topic("jobs", of=str, partitions=2)
    items = [penstock.Item(str(i), key=str(i), priority=i) for i in range(20)]
    ids = [MessageId.parse(text) for text in await topic.put_many(items)]
    assert {message.partition for message in ids} == {0, 1}
    for partition in (0, 1):
        expected = [str(i) for i, message in enumerate(ids) if message.partition == partition]
        found: list[str] = []
        async for message in topic.log(partition):
            found.append(message.value)
            if len(found) == len(expected):
                break
        assert found == expected
    assert sorted(await drained(topic, 20), key=int) == [str(i) for i in range(20)]


async def test_the_log_follows_what_is_committed(client: penstock.Client) -> None:
    topic = await client.topic("jobs")
    reader = topic.log(0).batches()
    kinds: list[Kind] = []
    await topic.put(b"x")
    await drained(topic, 1)
    async for batch in reader:
        kinds.append(batch.kind)
        if batch.kind is Kind.ACK:
            break
    assert kinds == [Kind.BARRIER, Kind.ENQ, Kind.LEASE, Kind.ACK]


async def test_errors_retry_and_then_dead_letter(client: penstock.Client) -> None:
    topic = await client.topic("jobs", of=str, backoff_ms_base=0)
    await topic.put("bad", max_retries=1)
    async with topic.consume() as messages:
        for attempt in range(2):
            message = await anext(messages)
            assert message.attempts == attempt
            with pytest.raises(ValueError):
                async with message:
                    raise ValueError("no good")
    (dead,) = [message async for message in topic.dlq]
    assert (dead.value, dead.reason) == ("bad", "retries")
    assert await topic.dlq.replay([dead]) == 1
    (message,) = await topic.pop(wait=60)
    await message.reject("still bad")
    (dead,) = await topic.dlq.peek()
    assert (dead.reason, dead.detail) == ("rejected", "still bad")
    assert await topic.dlq.delete(force=True) == 1


async def test_leases_outlive_their_visibility_while_held(client: penstock.Client) -> None:
    topic = await client.topic("jobs", of=int)
    await topic.put_many([1, 2])
    async with topic.consume(visibility=0.3, prefetch=1) as messages:
        async with await anext(messages):
            await asyncio.sleep(0.8)
        async with await anext(messages) as second:
            assert second.attempts == 0  # it waited here all the time, and kept its lease
    assert (await topic.stats()).expired_total == 0


async def test_a_lease_that_runs_out_is_lost(client: penstock.Client) -> None:
    topic = await client.topic("jobs", of=int, backoff_ms_base=0)
    await topic.put(1)
    (first,) = await topic.pop(visibility=0.05)
    (again,) = await topic.pop(wait=60)
    assert again.attempts == 1
    with pytest.raises(penstock.LeaseLost):
        await first.ack()
    await again.ack()


async def test_stopping_counts_no_attempt(client: penstock.Client) -> None:
    topic = await client.topic("jobs", of=int)
    await topic.put_many(list(range(10)))
    async with topic.consume(prefetch=5) as messages:
        await (await anext(messages)).ack()
    stats = await topic.stats()
    assert (stats.leased, stats.ready + stats.delayed, stats.retried_total) == (0, 9, 0)
    assert all(message.attempts == 0 for message in await topic.peek())


async def test_delay_pause_purge_and_delete(client: penstock.Client) -> None:
    topic = await client.topic("jobs", of=int)
    await topic.put(1, delay=0.1)
    assert await topic.pop() == []
    (message,) = await topic.pop(wait=60)
    await message.ack()
    await topic.pause()
    await topic.put(2)
    assert await topic.pop() == []
    await topic.resume()
    assert await topic.purge(force=True) == 1
    with pytest.raises(penstock.FailedPrecondition):
        await topic.delete()
    await topic.delete(force=True)
    with pytest.raises(penstock.NotFound):
        await client.topic("jobs", create=False)


async def test_expected_sequence_refuses_a_moved_log(client: penstock.Client) -> None:
    topic = await client.topic("jobs", of=int)
    last = MessageId.parse(await topic.put(1)).sequence
    await topic.put_many([2], expected_sequence=last)
    with pytest.raises(penstock.SequenceConflict):
        await topic.put_many([3], expected_sequence=last)


async def test_refusals_name_the_field(client: penstock.Client) -> None:
    topic = await client.topic("jobs", payload_bytes_max=10)
    with pytest.raises(penstock.InvalidArgument) as caught:
        await topic.put(bytes(11))
    assert caught.value.field == "payload" and caught.value.limit == 10
    with pytest.raises(penstock.AlreadyExists):
        await client.topic("jobs", partitions=9)


async def test_messages_survive_a_restart_of_the_folder(tmp_path: Path) -> None:
    async with penstock.connect(tmp_path) as client:
        await client.topic("jobs", of=str).put("kept", priority=5)
    async with penstock.connect(tmp_path) as client:
        assert await drained(client.topic("jobs", of=str), 1) == ["kept"]


async def test_puts_and_consumers_survive_lost_connections(tmp_path: Path) -> None:
    options = penstock.Options(retry_wait_s=0.01)
    async with (
        listening(tmp_path) as (node, url),
        penstock.connect(url, options=options) as client,
    ):
        topic = await client.topic("jobs", of=int)

        async def cut() -> None:
            for _ in range(5):
                await asyncio.sleep(0.03)
                for session in list(node.engine.connections):
                    session._transport.abort()

        cutting = asyncio.ensure_future(cut())
        ids = await asyncio.gather(*(topic.put(i) for i in range(200)))
        for i in range(200, 300):
            ids.append(await topic.put(i))
        await cutting
        assert len(set(ids)) == 300
        stats = await topic.stats()
        assert stats.enqueued_total == stats.ready == 300  # each once, whatever was repeated


async def test_tls_with_an_own_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(trusted))
    async with listening(tmp_path / "data", tls=server) as (_, url):
        async with penstock.connect(url, tls=trusted) as client:
            await client.topic("jobs").put(b"x")
        with pytest.raises(penstock.Unavailable):
            await penstock.connect(url).__aenter__()


async def test_a_wrong_key_is_refused(tmp_path: Path) -> None:
    async with listening(tmp_path) as (_, url):
        with pytest.raises(penstock.Unauthenticated):
            await penstock.connect(url, api_key="pk_no_such").__aenter__()
        async with penstock.connect(url) as client:
            key = (await client.call("key_create", name="app"))["key"]
        async with penstock.connect(url, api_key=key) as client:
            assert await client.topics() == []


async def test_where_to_connect_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(tmp_path / "data") as (_, url):
        monkeypatch.setenv("PENSTOCK_URL", url)
        async with penstock.connect() as client:
            await client.topic("jobs").put(b"x")
    monkeypatch.delenv("PENSTOCK_URL")
    monkeypatch.chdir(tmp_path)
    async with penstock.connect() as client:
        assert await client.topics() == []
    assert (tmp_path / "penstock-data" / "FORMAT").exists()


def test_the_sync_twin_does_the_same(tmp_path: Path) -> None:
    with penstock.sync.connect(tmp_path) as client:
        jobs = client.topic("jobs", of=str, backoff_ms_base=0)
        jobs.put("b", priority=2)
        jobs.put_many(["a", "c"])
        seen = []
        for message in jobs.consume():
            with message:
                seen.append(message.value)
            if len(seen) == 3:
                break
        assert seen == ["a", "c", "b"]
        jobs.put("bad", max_retries=0)
        (message,) = jobs.pop()
        with pytest.raises(KeyError), message:
            raise KeyError("x")
        assert [dead.value for dead in jobs.dlq] == ["bad"]
        assert jobs.dlq.replay() == 1
        with jobs.consume_batches(10) as batches:
            batch = next(iter(batches))
            assert batch.values == ["bad"] and len(batch) == 1
            batch.ack()
        assert jobs.stats().acked_total == 4 and jobs.peek() == []
        for message in jobs.log(0):
            assert message.value == "b"
            break


def test_the_sync_twin_raises_and_cleans_up(tmp_path: Path) -> None:
    with pytest.raises(penstock.Unavailable):
        penstock.sync.connect("penstock://127.0.0.1:1").__enter__()
    with pytest.raises(penstock.InvalidArgument):
        penstock.sync.connect("http://wrong")
    with penstock.sync.connect(tmp_path) as client, pytest.raises(penstock.NotFound):
        client.topic("missing", create=False)
