import asyncio
import time
from typing import Any

import numpy as np
import pytest

from penstock.client.network import exchange
from penstock.client.network.connection import Connection
from penstock.client.network.endpoints import open_connection
from penstock.errors import Corruption, InvalidArgument, NotFound, Unauthenticated, Unavailable
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.ids import LeaseToken
from penstock.wire import frame
from penstock.wire.frame import FrameType


def body(*payloads: bytes, producer: bytes = b"p", sequence: int = 1) -> bytes:
    runs = {
        "run_count": [len(payloads)],
        "run_epoch": [1],
        "run_sequence": [sequence],
        "run_producer": [producer],
    }
    return SCHEMAS[Kind.ENQ].encode(len(payloads), {"payload": payloads, **runs}, runs=1)


@pytest.fixture(params=["memory", "tcp"])
def either(request: pytest.FixtureRequest) -> Connection:
    found: Connection = request.getfixturevalue(
        "connection" if request.param == "memory" else "wired"
    )
    return found


async def test_a_call_is_answered_with_its_result(either: Connection) -> None:
    assert await either.call("echo", a=1) == {"method": "echo", "a": 1}


async def test_calls_in_flight_together_get_their_own_answers(either: Connection) -> None:
    answers = await asyncio.gather(*(either.call("echo", n=n) for n in range(50)))
    assert [answer["n"] for answer in answers] == list(range(50))


async def test_a_refused_call_raises_the_servers_error(either: Connection, broker: Any) -> None:
    broker.results["stats"] = NotFound("no topic of that name", topic="x")
    with pytest.raises(NotFound) as caught:
        await either.call("stats")
    assert caught.value.details["topic"] == "x"


async def test_enqueue_says_where_each_entry_went(either: Connection) -> None:
    enqueued = await either.enqueue("t", [(0, 2, body(b"a", b"b"))])
    assert [(p.index, p.sequence) for p in enqueued.placed] == [(0, 1), (1, 2)]
    again = await either.enqueue("t", [(0, 2, body(b"a", b"b"))])
    assert [(d.index, d.sequence) for d in again.duplicates] == [(0, 1), (1, 2)]


async def test_leases_are_delivered_within_credit_and_settled(either: Connection) -> None:
    await either.enqueue("t", [(0, 5, body(*(b"%d" % i for i in range(5))))])
    stream = await either.lease_stream("t", credits=3)
    first = await anext(stream)
    assert first.delivery.count == 3
    assert list(first.columns.binary("payload") or ()) == [b"0", b"1", b"2"]
    tokens = np.arange(first.delivery.token_first, first.delivery.token_first + 3, dtype=np.uint64)
    assert await either.settle_range("t", LeaseToken(1, 0, 3, 0), tokens) == []
    assert (await anext(stream)).delivery.count == 2
    assert await either.settle_range("t", LeaseToken(1, 0, 3, 0), tokens) == [0, 1, 2]


async def test_a_grant_adds_credit_and_must_be_positive(connection: Connection) -> None:
    await connection.enqueue("t", [(0, 3, body(b"a", b"b", b"c"))])
    stream = await connection.lease_stream("t", credits=1)
    assert (await anext(stream)).delivery.count == 1
    stream.grant(2)
    assert (await anext(stream)).delivery.count == 2
    with pytest.raises(ValueError):
        stream.grant(0)


async def test_lost_positions_follow_the_callers_order(connection: Connection, broker: Any) -> None:
    await connection.enqueue("t", [(0, 2, body(b"a", b"b"))])
    delivered = await anext(await connection.lease_stream("t", credits=2))
    held = delivered.delivery.token_first
    tokens = [LeaseToken(1, 1, 3, 9), LeaseToken(1, 0, 3, held), LeaseToken(1, 0, 2, 8)]
    assert await connection.extend("t", tokens, 1000) == [0, 2]
    assert [(p.partition, p.epoch) for p in broker.extended[0].parts] == [(0, 2), (0, 3), (1, 3)]
    assert await connection.give_back("t", tokens, delay_ms=5, counted=False) == [0, 2]
    assert broker.returned[0].delay_ms == 5 and not broker.returned[0].counted


async def test_a_refused_stream_raises_when_it_is_opened(connection: Connection) -> None:
    with pytest.raises(NotFound):
        await connection.lease_stream("missing", credits=1)


async def test_closing_a_stream_returns_what_nobody_took(connection: Connection) -> None:
    await connection.enqueue("t", [(0, 1, body(b"a"))])
    stream = await connection.lease_stream("t", credits=1)
    assert [batch.delivery.count for batch in await stream.close()] == [1]
    assert [batch async for batch in stream] == []


async def test_a_log_slice_is_verified_and_its_credit_returned(
    either: Connection, broker: Any
) -> None:
    stream = await either.log_stream("t", partition=4, from_sequence=8)
    batches = await anext(stream)
    assert [(b.partition, b.first, b.last) for b in batches] == [(4, 8, 9)]
    assert stream.sequence_committed == 9
    await either.call("echo")
    (grant,) = broker.logs[stream.number]
    assert grant.entries == 2 and grant.bytes >= batches[0].size


async def test_a_lost_connection_fails_requests_and_streams_as_unavailable(
    either: Connection, broker: Any
) -> None:
    stream = await either.lease_stream("t", credits=1)
    broker.drops = 1
    with pytest.raises(Unavailable):
        await either.enqueue("t", [(0, 1, body(b"a"))])
    with pytest.raises(Unavailable):
        async for _ in stream:
            pass
    with pytest.raises(Unavailable):
        await either.call("echo")
    assert not either.alive


async def test_what_is_asked_of_a_connection_that_was_left_was_not_sent(
    connection: Connection, broker: Any
) -> None:
    """Before, it failed as if its outcome were unknown, when the last answer had come with the
    server's farewell."""
    waiting = asyncio.ensure_future(connection.call("echo"))
    await asyncio.sleep(0)
    broker.sessions[0].refuse(0, Unavailable("the node stops", leaving=True))
    await waiting
    await asyncio.sleep(0)
    for request in (connection.call("echo"), connection.enqueue("t", [(0, 1, body(b"a"))])):
        with pytest.raises(Unavailable) as refused:
            await request
        assert refused.value.details["sent"] is False


async def test_a_request_that_was_lost_on_its_way_is_not_called_unsent(
    either: Connection, broker: Any
) -> None:
    broker.drops = 1
    with pytest.raises(Unavailable) as lost:
        await either.enqueue("t", [(0, 1, body(b"a"))])
    assert "sent" not in lost.value.details
    with pytest.raises(Unavailable) as late:
        await either.call("echo")
    assert late.value.details["sent"] is False


async def test_what_a_node_did_not_send_says_nothing_about_our_request(
    connection: Connection, broker: Any
) -> None:
    broker.results["stats"] = Unavailable("node n2 is not connected", sent=False)
    with pytest.raises(Unavailable) as refused:
        await connection.call("stats")
    assert "sent" not in refused.value.details


async def test_a_refused_greeting_is_raised(broker: Any, url: str) -> None:
    broker.greeting = Unauthenticated("unknown key")
    with pytest.raises(Unauthenticated):
        await open_connection(url, api_key="pk_x_y")


async def test_nobody_at_the_port_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        await open_connection("penstock://127.0.0.1:1")


@pytest.mark.parametrize("url", ["http://a", "penstock://a:b", "penstock://a:1/path"])
async def test_a_malformed_url_names_its_field(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await open_connection(url)
    assert caught.value.field == "url"


async def test_an_idle_connection_sends_heartbeats(connection: Connection, broker: Any) -> None:
    beat = asyncio.Event()
    broker.sessions[0].on_heartbeat = lambda item: beat.set()
    async with asyncio.timeout(60):
        await beat.wait()


async def test_a_server_that_goes_silent_is_lost(connection: Connection, broker: Any) -> None:
    stream = await connection.lease_stream("t", credits=1)
    broker.sessions[0].data_received = lambda data: None
    with pytest.raises(Unavailable, match="silent"):
        await anext(stream)


async def test_garbage_from_the_peer_ends_the_connection(
    connection: Connection, broker: Any
) -> None:
    waiting = asyncio.ensure_future(connection.call("echo"))
    broker.sessions[0].transport.write(b"\x00" * 32)
    with pytest.raises(Corruption):
        await waiting
    assert not connection.alive


async def test_an_answer_that_is_none_fails_who_waits_for_it(
    connection: Connection, broker: Any
) -> None:
    broker.sessions[0].data_received = lambda data: None  # it does not answer by itself
    waiting = asyncio.ensure_future(connection.call("echo"))
    await asyncio.sleep(0)
    [number] = connection._waiting
    garbage = frame.encode(FrameType.ACK, number, b"\x00\x00\x00\x01\xc1")
    broker.sessions[0].transport.writelines(garbage)
    async with asyncio.timeout(60):
        with pytest.raises(Corruption):
            await waiting
    assert not connection.alive


async def test_writers_wait_while_the_peer_does_not_read(
    connection: Connection, broker: Any
) -> None:
    far = broker.sessions[0].transport
    far.pause_reading()
    first = asyncio.ensure_future(connection.call("echo", fill=bytes(2 << 20)))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(connection.call("echo"))
    await asyncio.sleep(0)
    assert len(connection._waiting) == 1  # the second was not even written
    far.resume_reading()
    await asyncio.gather(first, second)


async def test_a_late_answer_is_not_waited_for(connection: Connection, broker: Any) -> None:
    connection.answer_s = 0.05
    broker.mute = {"n1"}
    with pytest.raises(Unavailable, match="no answer within"):
        await connection.call("stats")
    assert connection.alive and connection.elsewhere and not connection._waiting
    broker.mute.clear()
    assert (await connection.call("stats"))["method"] == "stats"


async def test_what_takes_long_by_design_is_waited_for(connection: Connection, broker: Any) -> None:
    connection.answer_s = 0.05
    broker.mute = {"n1"}
    asked = [
        asyncio.ensure_future(connection.call("pop", wait_ms=60_000)),
        asyncio.ensure_future(connection.call("verify")),
        asyncio.ensure_future(connection.call("topic_create", config={"name": "t"})),
        asyncio.ensure_future(connection.call("topic_update", topic="t", changes={})),
        asyncio.ensure_future(connection.log_stream("t", partition=0)),
    ]
    with pytest.raises(Unavailable):
        await connection.call("stats")
    assert len(connection._waiting) == len(asked)
    connection.abort()
    assert all(
        isinstance(e, Unavailable) for e in await asyncio.gather(*asked, return_exceptions=True)
    )


async def test_a_loop_that_stood_still_is_not_a_late_answer(connection: Connection) -> None:
    connection.answer_s = 0.05
    asked = asyncio.ensure_future(connection.call("stats"))
    await asyncio.sleep(0)
    time.sleep(0.2)  # as a handler does that computes
    assert (await asked)["method"] == "stats"


async def test_a_late_server_without_a_sign_of_life_is_lost(
    connection: Connection, broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "SILENT_TICKS_MAX", 1 << 30)
    connection.answer_s = 0.2
    broker.sessions[0].data_received = lambda _: None
    with pytest.raises(Unavailable):
        await connection.call("stats")
    assert not connection.alive


async def test_a_server_that_does_not_read_is_not_waited_for(
    connection: Connection, broker: Any
) -> None:
    connection.answer_s = 0.05
    broker.sessions[0].transport.pause_reading()
    connection.pause_writing()
    with pytest.raises(Unavailable, match="does not read") as refused:
        await connection.call("pop")
    assert refused.value.details["sent"] is False
    broker.sessions[0].transport.resume_reading()
