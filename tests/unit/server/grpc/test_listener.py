from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.config import Config
from penstock.errors import DiskFull, InvalidArgument, PenstockError, SequenceConflict
from penstock.model.ids import MessageId
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated.penstock_pb2_grpc import PenstockStub
from penstock.server.gateway import Gateway


@pytest.fixture
async def channel(gateway: Gateway) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return PenstockStub(channel)


async def refusal(call: Any) -> tuple[str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code().name, dict(refused.value.trailing_metadata())


async def test_one_message_with_everything(stub: Any, node: Any) -> None:
    request = pb.EnqueueRequest(
        topic="jobs", payload=b"\xff", priority=-9, key=b"\x00k", headers={"a": "b"}, delay_ms=5,
        max_retries=0, producer_id="p", epoch=2, seq=0,
    )  # fmt: skip
    answer = await stub.Enqueue(request)
    assert MessageId.parse(answer.message_id).topic == 7
    columns = node.enqueues[0][1]
    assert list(columns.binary("payload")) == [b"\xff"]
    assert msgspec.msgpack.decode(columns.binary("headers")[0]) == {"a": "b"}
    assert columns.fixed("max_retries").tolist() == [0]
    assert columns.fixed("run_epoch").tolist() == [2]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"payload": b"x" * ((1 << 20) + 1)}, "payload"),
        ({"key": b"k" * 1025}, "key"),
        ({"headers": {"h": "x" * 20_000}}, "headers"),
        ({"delay_ms": -1}, "delay_ms"),
        ({"max_retries": 1001}, "max_retries"),
        ({"topic": "a/b"}, "topic"),
    ],
)
async def test_a_message_over_a_limit_is_not_sent(
    stub: Any, node: Any, fields: dict[str, Any], field: str
) -> None:
    code, trailing = await refusal(stub.Enqueue(pb.EnqueueRequest(**{"topic": "jobs", **fields})))
    assert (code, trailing["penstock-field"]) == ("INVALID_ARGUMENT", field)
    assert not node.enqueues


async def test_a_batch_answers_in_its_order(stub: Any, node: Any) -> None:
    messages = [pb.NewMessage(payload=b"%d" % i, priority=i) for i in range(100)]
    answer = await stub.EnqueueBatch(pb.EnqueueBatchRequest(topic="jobs", messages=messages))
    sequences = [MessageId.parse(text).sequence for text in answer.message_ids]
    assert sequences == list(range(1, 101)) and not answer.duplicates
    sent, columns = node.enqueues[0]
    assert sent.atomic and not sent.partitioned
    assert columns.fixed("priority").tolist() == list(range(100))


async def test_expected_sequence_goes_to_one_partition(stub: Any, node: Any) -> None:
    node.refuse_enqueue = lambda *_: SequenceConflict("at 9", sequence=9)
    request = pb.EnqueueBatchRequest(
        topic="jobs", messages=[pb.NewMessage(payload=b"a")], expected_sequence=0, atomic=False
    )
    assert (await refusal(stub.EnqueueBatch(request)))[0] == "ABORTED"
    sent = node.enqueues[0][0]
    assert (sent.partitioned, sent.expected_sequence, sent.atomic) == (True, 0, False)


@pytest.mark.parametrize(
    ("error", "code", "trailing"),
    [
        (InvalidArgument("no", field="k", limit=5), "INVALID_ARGUMENT", {"penstock-field": "k"}),
        (DiskFull("full", retry_after_s=2.5), "RESOURCE_EXHAUSTED", {"retry-after": "3"}),
        (PenstockError("odd"), "UNAVAILABLE", {"penstock-code": "internal"}),
    ],
)
async def test_errors_travel_in_the_trailing_metadata(
    stub: Any, node: Any, error: Any, code: str, trailing: dict[str, str]
) -> None:
    node.answers["peek"] = error
    call = stub.Peek(pb.PeekRequest(topic="jobs"), metadata=(("x-request-id", "r7"),))
    found, metadata = await refusal(call)
    assert found == code
    assert (trailing | {"x-request-id": "r7"}).items() <= metadata.items()


@pytest.mark.parametrize("metadata", [("authorization", "Bearer pk_x_y"), ("x-api-key", "pk_x_y")])
async def test_a_wrong_key_is_unauthenticated(
    stub: Any, node: Any, metadata: tuple[str, str]
) -> None:
    code, _ = await refusal(stub.ListHeaps(pb.ListHeapsRequest(), metadata=(metadata,)))
    assert code == "UNAUTHENTICATED" and not node.calls


async def test_enums_and_optional_fields_are_what_was_set(stub: Any, node: Any) -> None:
    node.answers["topic_create"] = msgspec.to_builtins(node.topics["jobs"]) | {"mode": "max"}
    heap = await stub.MakeHeap(pb.MakeHeapRequest(topic="jobs", mode=pb.MAX, dlq=False))
    assert heap.mode == pb.MAX and heap.topic == "jobs" and heap.k == 100
    assert node.calls == [
        (
            "topic_create",
            {"config": {"name": "jobs", "mode": "max", "dlq": False}, "exists_ok": False},
        )
    ]


async def test_stats_reach_the_partitions(stub: Any, node: Any) -> None:
    partition = {"partition": 1, "ready": 4, "snapshot_age_ms": None, "something_new": 1}
    node.answers["stats"] = {"topics": [{"name": "jobs", "ready": 4, "partitions": [partition]}]}
    (heap,) = (await stub.Stats(pb.StatsRequest())).topics
    assert (heap.topic, heap.partitions[0].partition, heap.partitions[0].ready) == ("jobs", 1, 4)
    assert node.calls == [("stats", {})]


async def test_health_and_reflection(channel: grpc.aio.Channel, node: Any) -> None:
    check = health_pb2.HealthCheckRequest(service="penstock.v1.Penstock")
    health = await health_pb2_grpc.HealthStub(channel).Check(check)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
    answer = await stream.read()
    assert "penstock.v1.Penstock" in [s.name for s in answer.list_services_response.service]


async def open_stream(stub: Any, **fields: Any) -> Any:
    stream = stub.PopStream()
    opening = pb.PopOpen(**{"topic": "jobs", "credits": 2, **fields})
    await stream.write(pb.PopStreamRequest(open=opening))
    return stream


async def test_a_stream_delivers_and_takes_credit_and_acks(
    stub: Any, node: Any, eventually: Callable[..., Any]
) -> None:
    node.deliver, node.lost = 1, [0]
    stream = await open_stream(stub, consumer="c", visibility_ms=50)
    (item,) = (await stream.read()).items
    assert (item.lease_token, item.payload, item.headers["a"]) == ("7.3.2.9", b"p0", "b")
    assert MessageId.parse(item.message_id) == MessageId(1_000, 7, 3, 1)
    await stream.write(pb.PopStreamRequest(flow=pb.FlowControl(credits=3)))
    ack = pb.AckBatchRequest(lease_tokens=[item.lease_token])
    await stream.write(pb.PopStreamRequest(ack=ack))
    assert list((await stream.read()).lost) == ["7.3.2.9"]
    assert node.grants == [3] and node.streams[0].visibility_ms == 50
    stream.cancel()
    await eventually(lambda: node.unsubscribed == 1)


async def test_a_half_closed_stream_goes_on(stub: Any, node: Any) -> None:
    node.deliver = 2
    stream = await open_stream(stub)
    await stream.done_writing()
    tokens = [(await stream.read()).items[0].lease_token for _ in range(2)]
    assert tokens == ["7.3.2.9", "7.3.2.a"]
    stream.cancel()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.PopStreamRequest(flow=pb.FlowControl(credits=1)), "open"),
        (pb.PopStreamRequest(open=pb.PopOpen(topic="jobs")), "credits"),
        (pb.PopStreamRequest(open=pb.PopOpen(topic="a b", credits=1)), "topic"),
        (pb.PopStreamRequest(open=pb.PopOpen(topic="jobs", credits=1, batch_max=0)), "batch_max"),
    ],
)
async def test_a_stream_that_opens_wrongly_is_refused(
    stub: Any, request_: pb.PopStreamRequest, field: str
) -> None:
    stream = stub.PopStream()
    await stream.write(request_)
    code, trailing = await refusal(stream.read())
    assert (code, trailing["penstock-field"]) == ("INVALID_ARGUMENT", field)


async def test_a_wrong_request_ends_an_open_stream(stub: Any, node: Any) -> None:
    stream = await open_stream(stub)
    nack = pb.NackBatchRequest(lease_tokens=["x"])
    await stream.write(pb.PopStreamRequest(nack=nack))
    code, trailing = await refusal(stream.read())
    assert (code, trailing["penstock-field"]) == ("INVALID_ARGUMENT", "lease_tokens[0]")


async def test_a_cancelled_pop_gives_its_messages_back(
    stub: Any, node: Any, eventually: Callable[..., Any], unused: Callable[[], Any]
) -> None:
    await stub.Peek(pb.PeekRequest(topic="jobs"))
    session = node.sessions[0]
    held: list[Any] = []
    answer, session.answer = session.answer, lambda *given: held.append(given)
    call = stub.Pop(pb.PopRequest(topic="jobs", wait_ms=60_000))
    await eventually(lambda: bool(held))
    call.cancel()
    await unused()
    session.answer = answer
    answer(held[0][0], {"messages": [{"lease_token": "1.0.1.5"}]})
    await eventually(lambda: bool(node.settlements))
    assert node.settlements[0].counted is False


@pytest.mark.parametrize("half_closed", [True, False], ids=["without one", "silent"])
async def test_a_call_whose_message_does_not_come_is_told_so(
    node: Any, options: Config, half_closed: bool
) -> None:
    limits = msgspec.structs.replace(options.limits, frame_s=0.05)
    gateway = Gateway(
        node.connect, msgspec.structs.replace(options, limits=limits), metrics_text=lambda: b""
    )
    await gateway.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ports['grpc']}") as channel:
            call = channel.stream_unary("/penstock.v1.Penstock/Ack")()
            if half_closed:
                await call.done_writing()
            code, trailing = await refusal(call)
            assert (code, trailing["penstock-field"]) == ("INVALID_ARGUMENT", "message")
            # The call that was cancelled for it leaves nothing behind for the next one.
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
        assert gateway._grpc._calls._total == 0
        assert not gateway._grpc._calls._expected and not gateway._grpc._calls._overdue
    finally:
        await gateway.stop()
