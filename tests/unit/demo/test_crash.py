"""The demo's account of a crash notices what must not happen, and counts what was confirmed."""

import asyncio
from typing import Any

import pytest

from penstock.client.client import Client
from penstock.demo.queue import crash
from penstock.demo.queue.crash import ClientLedger, Lease
from penstock.model.ids import LeaseToken
from penstock.server.embedded import EmbeddedNode

TOKEN = LeaseToken(1, 0, 1, 7)


class Ahead:
    """A node whose statistics show an acknowledgement before it has answered it."""

    def __init__(self, ledger: ClientLedger) -> None:
        self.ledger = ledger
        self.asked = 0

    async def call(self, name: str, **_: Any) -> dict[str, Any]:
        assert name == "stats"
        self.asked += 1
        if self.asked == 2:
            self.ledger.settled([1])
        await asyncio.sleep(0)
        return {"topics": [{"ready": 0, "delayed": 0, "leased": 0}]}

    async def lease_stream(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()


async def test_an_acknowledgement_under_way_is_waited_for() -> None:
    ledger = ClientLedger(visibility_ms=60_000, started={1}, put={1})
    ledger.delivered([(1, Lease(TOKEN, (0, 1)))])
    producers = asyncio.create_task(asyncio.sleep(0))
    await crash._drain(Ahead(ledger), ledger, producers)  # type: ignore[arg-type]
    assert ledger.done == {1}


async def test_an_acknowledgement_counts_if_the_log_has_it(
    penstock_client: Client, penstock_node: EmbeddedNode
) -> None:
    topic = await penstock_client.topic(crash.TOPIC, of=bytes, partitions=2)
    await topic.put_many([b"1", b"2", b"3"])
    connection = await penstock_node.connect()
    found = (await connection.call("pop", topic=crash.TOPIC, limit=2))["messages"]
    tokens = [LeaseToken.parse(message["lease_token"]) for message in found]
    await connection.settle(crash.TOPIC, tokens[:1])
    acknowledged = await crash._acknowledged_in_log(connection)
    assert acknowledged == {(tokens[0].partition, tokens[0].sequence)}
    await connection.close()


def lease(key: int, sequence: int | None = None) -> tuple[int, Lease]:
    return key, Lease(TOKEN, (0, key if sequence is None else sequence))


@pytest.fixture
def ledger() -> ClientLedger:
    made = ClientLedger(visibility_ms=60_000)
    made.started |= {1, 2}
    return made


def test_an_orderly_run_leaves_no_finding(ledger: ClientLedger) -> None:
    ledger.delivered([lease(1)])
    ledger.settled([1])
    assert ledger.done == {1}
    assert not (ledger.phantoms or ledger.resurrected or ledger.overlaps or ledger.unsure)


def test_a_message_nobody_put_is_a_phantom(ledger: ClientLedger) -> None:
    ledger.delivered([lease(99)])
    assert ledger.phantoms == {99}


def test_a_message_delivered_after_its_ack_is_found(ledger: ClientLedger) -> None:
    ledger.delivered([lease(1)])
    ledger.settled([1])
    ledger.delivered([lease(1)])
    assert ledger.resurrected == {1}


def test_one_put_that_became_two_messages_is_found(ledger: ClientLedger) -> None:
    ledger.delivered([lease(1, sequence=10)])
    ledger.settled([1])
    ledger.delivered([lease(1, sequence=11)])
    assert ledger.doubled == {1}


def test_two_leases_at_a_time_are_found(ledger: ClientLedger) -> None:
    ledger.delivered([lease(1)])
    ledger.delivered([lease(1)])
    ledger.hold([lease(2)])
    ledger.delivered([lease(2)])
    assert ledger.overlaps == {1, 2}


def test_a_delivery_after_the_lease_ran_out_is_allowed() -> None:
    ledger = ClientLedger(visibility_ms=0, started={1})
    ledger.delivered([lease(1)])
    ledger.delivered([lease(1)])
    assert (ledger.overlaps, ledger.redelivered) == (set(), {1})


async def test_waiters_wake_when_the_count_is_reached(ledger: ClientLedger) -> None:
    import asyncio

    waiting = asyncio.create_task(ledger.reached(2))
    await asyncio.sleep(0)
    ledger.acknowledge(1)
    assert not waiting.done()
    ledger.acknowledge(2)
    await waiting
