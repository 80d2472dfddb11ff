"""Both listeners before the real engine, end to end."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import trustme

from penstock.config import Config, TlsOptions
from penstock.model.delta import Delta, Op, encode
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.server.embedded import open_embedded
from penstock.server.gateway import Gateway


class Site:
    def __init__(self, http: httpx.AsyncClient, stub: Any) -> None:
        self.http, self.stub = http, stub

    async def post(self, path: str, **fields: Any) -> Any:
        answer = await self.http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def pop(self, topic: str, **fields: Any) -> list[dict[str, Any]]:
        popped = await self.post("/v1/pop", topic=topic, **fields)
        return list(popped["messages"])

    async def confirmed(self, method: str, **subject: str) -> dict[str, Any]:
        granted = await self.post("/v1/confirm", method=method, **subject)
        return {"force": True, "confirm": granted["confirm"]}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    config = Config(data=tmp_path, native_port=-1, grpc_port=0, http_port=0, drain_s=1.0)
    async with AsyncExitStack() as stack:
        node = await open_embedded(tmp_path, config=config)
        stack.push_async_callback(node.close)
        gateway = Gateway(node.connect, config, metrics_text=node.engine.metrics.text)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.ports['http']}")
        await stack.enter_async_context(http)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}")
        await stack.enter_async_context(channel)
        site = Site(http, PenstockStub(channel))
        await site.post("/v1/heaps", topic="jobs", max_retries=0, backoff_ms_base=0)
        yield site


async def test_messages_come_by_priority_and_go_when_acked(site: Site) -> None:
    for priority in (5, 1, 3):
        await site.post("/v1/enqueue", topic="jobs", payload={"p": priority}, priority=priority)
    peeked = (await site.http.get("/v1/peek?topic=jobs")).json()["messages"]
    assert [m["payload"]["p"] for m in peeked] == [1, 3, 5]
    found = [(await site.pop("jobs"))[0] for _ in range(3)]
    assert [m["priority"] for m in found] == [1, 3, 5]
    tokens = [m["lease_token"] for m in found]
    await site.post(
        "/v1/ack", topic="jobs", lease_token=tokens[0], message_id=found[0]["message_id"]
    )
    settled = await site.post("/v1/ack:batch", topic="jobs", lease_tokens=tokens)
    assert settled == {"lost": [tokens[0]]}
    (stats,) = (await site.http.get("/v1/stats?topic=jobs")).json()["topics"]
    assert (stats["ready"], stats["leased"], stats["acked_total"]) == (0, 0, 3)


async def test_a_long_poll_is_woken_by_an_enqueue(site: Site) -> None:
    waiting = asyncio.ensure_future(site.pop("jobs", wait_ms=20_000))
    await asyncio.sleep(0.05)
    await site.post("/v1/enqueue", topic="jobs", payload=1)
    (message,) = await asyncio.wait_for(waiting, 60)
    assert message["payload"] == 1


async def test_concurrent_enqueues_are_each_answered_for_themselves(site: Site) -> None:
    puts = [{"topic": "jobs", "payload": i} for i in range(100)]
    puts[7]["delay_ms"] = -1
    puts[8]["topic"] = "nowhere"
    answers = await asyncio.gather(*(site.http.post("/v1/enqueue", json=put) for put in puts))
    statuses = [answer.status_code for answer in answers]
    assert statuses[7:9] == [400, 404] and statuses.count(200) == 98
    ids = {a.json()["message_id"] for a in answers if a.status_code == 200}
    assert len(ids) == 98


async def test_a_repeated_producer_key_returns_the_first_id(site: Site) -> None:
    put = {"topic": "jobs", "payload": 1, "producer_id": "p", "epoch": 2, "seq": 5}
    first = await site.post("/v1/enqueue", **put)
    again = await site.post("/v1/enqueue", **put)
    assert again == {"message_id": first["message_id"], "duplicate": True}
    batch = pb.EnqueueBatchRequest(
        topic="jobs",
        messages=[{"payload": b"1"}, {"payload": b"2"}],
        producer_id="p",
        epoch=2,
        seq=5,
    )
    answer = await site.stub.EnqueueBatch(batch)
    assert answer.message_ids[0] == first["message_id"] and list(answer.duplicates) == [0]
    stale = await site.http.post("/v1/enqueue", json={**put, "epoch": 1, "seq": 9})
    assert (stale.status_code, stale.json()["code"]) == (412, "stale_producer")


async def test_the_dead_are_listed_replayed_and_deleted(site: Site) -> None:
    for payload in ("a", "b"):
        await site.post("/v1/enqueue", topic="jobs", payload=payload)
    for message in await site.pop("jobs", limit=2):
        token = message["lease_token"]
        await site.post("/v1/nack", topic="jobs", lease_token=token, reject=True, reason="odd")
    page = (await site.http.get("/v1/dlq?topic=jobs&limit=1")).json()
    assert page["messages"][0]["reason"] == "rejected" and page["next"]
    rest = await site.stub.DlqList(pb.DlqListRequest(topic="jobs", after=page["next"]))
    assert rest.messages[0].detail == "odd" and rest.messages[0].payload == b'"b"'
    first = page["messages"][0]["message_id"]
    assert await site.post("/v1/dlq:replay", topic="jobs", message_ids=[first]) == {"replayed": 1}
    assert (await site.pop("jobs"))[0]["message_id"] == first
    granted = await site.confirmed("dlq_delete", topic="jobs")
    assert await site.post("/v1/dlq:delete", topic="jobs", **granted) == {"deleted": 1}


async def test_a_message_moves_to_the_dead_by_hand(site: Site) -> None:
    put = await site.post("/v1/enqueue", topic="jobs", payload=1)
    move = pb.MoveToDLQRequest(topic="jobs", message_id=put["message_id"], reason="stuck")
    await site.stub.MoveToDLQ(move)
    (dead,) = (await site.http.get("/v1/dlq?topic=jobs")).json()["messages"]
    assert (dead["reason"], dead["detail"]) == ("moved", "stuck")


async def test_a_destructive_call_takes_two_steps(site: Site) -> None:
    await site.post("/v1/enqueue", topic="jobs", payload=1)
    granted = await site.confirmed("purge", topic="jobs")
    elsewhere = await site.http.delete("/v1/heaps/jobs", params=granted)
    assert elsewhere.json()["field"] == "confirm"
    granted = await site.confirmed("purge", topic="jobs")
    assert await site.post("/v1/purge", topic="jobs", **granted) == {"purged": 1}
    again = await site.http.post("/v1/purge", json={"topic": "jobs", **granted})
    assert again.status_code == 412
    granted = await site.confirmed("topic_delete", topic="jobs")
    assert (await site.http.delete("/v1/heaps/jobs", params=granted)).status_code == 200
    assert (await site.http.get("/v1/heaps/jobs")).status_code == 404


async def test_a_limit_changed_while_it_runs_holds_at_once(site: Site) -> None:
    put = {"topic": "jobs", "payload": "x" * 500}
    assert (await site.http.post("/v1/enqueue", json=put)).status_code == 200
    await site.http.patch("/v1/heaps/jobs", json={"payload_bytes_max": 100})
    refused = await site.http.post("/v1/enqueue", json=put)
    assert (refused.json()["field"], refused.json()["limit"]) == ("payload", 100)


async def test_expected_sequence_conflicts_are_aborted(site: Site) -> None:
    at = 0
    for _ in range(2):
        request = pb.EnqueueBatchRequest(
            topic="jobs", messages=[{"payload": b"1"}], expected_sequence=at
        )
        at = (await site.stub.EnqueueBatch(request)).sequence_last
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await site.stub.EnqueueBatch(request)
    assert refused.value.code() is grpc.StatusCode.ABORTED


async def test_a_stream_keeps_to_its_credits(site: Site) -> None:
    messages = [{"payload": b"%d" % i, "priority": i} for i in range(6)]
    await site.stub.EnqueueBatch(pb.EnqueueBatchRequest(topic="jobs", messages=messages))
    stream = site.stub.PopStream()
    await stream.write(pb.PopStreamRequest(open=pb.PopOpen(topic="jobs", credits=2)))
    first = await items(stream, 2)
    stats = await site.stub.Stats(pb.StatsRequest(topic="jobs"))
    assert stats.topics[0].leased == 2
    await stream.write(pb.PopStreamRequest(flow=pb.FlowControl(credits=1)))
    third = await items(stream, 1)
    tokens = [item.lease_token for item in first]
    await stream.write(pb.PopStreamRequest(ack=pb.AckBatchRequest(lease_tokens=tokens)))
    rest = await items(stream, 2)
    assert [int(i.payload) for i in first + third + rest] == [0, 1, 2, 3, 4]
    stream.cancel()


async def items(stream: Any, count: int) -> list[pb.PopItem]:
    found: list[pb.PopItem] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += (await stream.read()).items
    assert len(found) == count
    return found


async def test_both_listeners_speak_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    config = Config(
        data=tmp_path / "data", native_port=-1, grpc_port=0, http_port=0,
        tls=TlsOptions(cert=cert, key=key),
    )  # fmt: skip
    node = await open_embedded(tmp_path / "data", config=config)
    gateway = Gateway(node.connect, config)
    await gateway.start()
    try:
        context = ssl.create_default_context(cafile=str(ca))
        async with httpx.AsyncClient(verify=context) as http:
            url = f"https://localhost:{gateway.ports['http']}/v1/status"
            assert (await http.get(url)).status_code == 200
        trusted = grpc.ssl_channel_credentials(ca.read_bytes())
        address = f"localhost:{gateway.ports['grpc']}"
        async with grpc.aio.secure_channel(address, trusted) as channel:
            assert (await PenstockStub(channel).Status(pb.StatusRequest())).format == 1
    finally:
        await gateway.stop()
        await node.close()


async def test_deltas_go_in_and_are_not_popped(site: Site) -> None:
    made = await site.post("/v1/heaps", topic="vectors", kind="delta", dimensions=2, partitions=2)
    assert (made["kind"], made["dimensions"]) == ("delta", 2)
    delta = Delta(
        delta_id=b"d" * 16, namespace="n", vector_id="v", op=Op.CREATE, origin="w", time=1,
        clock={"w": 1}, values=np.ones(2),
    )  # fmt: skip
    payload = base64.b64encode(encode(delta, dimensions=2)).decode()
    written = await site.post("/v1/enqueue", topic="vectors", payload_base64=payload)
    assert not written["duplicate"]
    bad = await site.http.post("/v1/enqueue", json={"topic": "vectors", "payload": "x"})
    assert (bad.status_code, bad.json()["field"]) == (400, "payload")
    popped = await site.http.post("/v1/pop", json={"topic": "vectors"})
    assert (popped.status_code, popped.json()["field"]) == (400, "topic")
    heap = await site.stub.GetHeap(pb.GetHeapRequest(topic="vectors"))
    assert (heap.kind, heap.dimensions) == (pb.DELTA, 2)
    with pytest.raises(grpc.aio.AioRpcError, match="is a delta topic"):
        await site.stub.Peek(pb.PeekRequest(topic="vectors"))


async def made_again(site: Site) -> tuple[dict[str, Any], dict[str, Any]]:
    """A leased message of `jobs`, and one of its successor that stands in the same place."""
    held = []
    for payload in ("old", "new"):
        await site.post("/v1/enqueue", topic="jobs", payload=payload)
        held += await site.pop("jobs")
        if payload == "old":
            confirmed = await site.confirmed("topic_delete", topic="jobs")
            await site.http.request("DELETE", "/v1/heaps/jobs", params=confirmed)
            await site.post("/v1/heaps", topic="jobs")
    return held[0], held[1]


async def test_a_token_of_a_deleted_heap_settles_nothing_of_its_successor(site: Site) -> None:
    """Before, both tokens were the same, and the old one finished the new message."""
    old, new = await made_again(site)
    token = {"topic": "jobs", "lease_token": old["lease_token"]}
    for path, fields in (
        ("/v1/ack", {}),
        ("/v1/nack", {"reject": True}),
        ("/v1/extend", {"extend_ms": 10_000}),
    ):
        answer = await site.http.post(path, json=token | fields)
        assert answer.json()["code"] == "lease_lost", path
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await site.stub.Ack(pb.AckRequest(topic="jobs", lease_token=old["lease_token"]))
    assert dict(refused.value.trailing_metadata() or ())["penstock-code"] == "lease_lost"
    tokens = [old["lease_token"], new["lease_token"]]
    lost = await site.stub.AckBatch(pb.AckBatchRequest(topic="jobs", lease_tokens=tokens))
    assert list(lost.lost) == tokens[:1]


async def test_a_token_of_the_earlier_form_says_what_it_lacks(site: Site) -> None:
    answer = await site.http.post("/v1/ack", json={"topic": "jobs", "lease_token": "0.1.3"})
    error = answer.json()
    assert (answer.status_code, error["field"]) == (400, "lease_token")
    assert "names no topic" in error["message"]
