"""The demo's own account must notice what it claims cannot happen."""

import pytest

from penstock.cli.demo.ledger import Lease, Ledger
from penstock.model.ids import LeaseToken

TOKEN = LeaseToken(0, 1, 1)


def lease(key: int, sequence: int | None = None) -> tuple[int, Lease]:
    return key, Lease(TOKEN, (0, key if sequence is None else sequence))


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger(visibility_ms=60_000)
    made.started |= {1, 2}
    return made


def test_an_orderly_run_leaves_no_finding(ledger: Ledger) -> None:
    ledger.delivered([lease(1)])
    ledger.settled([1])
    assert ledger.done == {1}
    assert not (ledger.phantoms or ledger.resurrected or ledger.overlaps or ledger.unsure)


def test_a_message_nobody_put_is_a_phantom(ledger: Ledger) -> None:
    ledger.delivered([lease(99)])
    assert ledger.phantoms == {99}


def test_a_message_delivered_after_its_ack_is_found(ledger: Ledger) -> None:
    ledger.delivered([lease(1)])
    ledger.settled([1])
    ledger.delivered([lease(1)])
    assert ledger.resurrected == {1}


def test_one_put_that_became_two_messages_is_found(ledger: Ledger) -> None:
    ledger.delivered([lease(1, sequence=10)])
    ledger.settled([1])
    ledger.delivered([lease(1, sequence=11)])
    assert ledger.doubled == {1}


def test_two_leases_at_a_time_are_found(ledger: Ledger) -> None:
    ledger.delivered([lease(1)])
    ledger.delivered([lease(1)])
    ledger.hold([lease(2)])
    ledger.delivered([lease(2)])
    assert ledger.overlaps == {1, 2}


def test_a_delivery_after_the_lease_ran_out_is_allowed() -> None:
    ledger = Ledger(visibility_ms=0, started={1})
    ledger.delivered([lease(1)])
    ledger.delivered([lease(1)])
    assert (ledger.overlaps, ledger.redelivered) == (set(), {1})


async def test_waiters_wake_when_the_count_is_reached(ledger: Ledger) -> None:
    import asyncio

    waiting = asyncio.create_task(ledger.reached(2))
    await asyncio.sleep(0)
    ledger.acknowledge(1)
    assert not waiting.done()
    ledger.acknowledge(2)
    await waiting
