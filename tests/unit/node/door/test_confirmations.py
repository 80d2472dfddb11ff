"""Confirmation tokens: one caller, one use, one subject, one minute."""

import pytest

from penstock.errors import FailedPrecondition
from penstock.node.clock import ManualClock
from penstock.node.door.confirmations import OPEN_MAX, OPEN_PER_CALLER_MAX, Confirmations, Deed

PURGE = Deed("purge", "orders", 7)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ms=0)


@pytest.fixture
def confirmations(clock: ManualClock) -> Confirmations:
    return Confirmations(clock)


def refused(
    confirmations: Confirmations, token: str, deed: Deed = PURGE, *, caller: str = "a"
) -> bool:
    try:
        confirmations.use(caller, token, deed, force=True)
    except FailedPrecondition as error:
        return bool(error.details["field"] == "confirm")
    return False


def test_a_token_is_good_once(confirmations: Confirmations) -> None:
    token, _ = confirmations.give("a", PURGE)
    assert not refused(confirmations, token)
    assert refused(confirmations, token)


@pytest.mark.parametrize(
    "deed",
    [Deed("topic_delete", "orders", 7), Deed("purge", "invoices", 7), Deed("purge", "orders", 8)],
    ids=["another call", "another topic", "another topic of that name"],
)
def test_a_token_is_good_for_nothing_else(confirmations: Confirmations, deed: Deed) -> None:
    token, _ = confirmations.give("a", PURGE)
    assert refused(confirmations, token, deed)


def test_a_token_is_good_for_who_asked_for_it(confirmations: Confirmations) -> None:
    """Before, it was good for anybody."""
    token, _ = confirmations.give("a", PURGE)
    assert refused(confirmations, token, caller="b")
    assert not refused(confirmations, token)


def test_a_token_expires(confirmations: Confirmations, clock: ManualClock) -> None:
    token, _ = confirmations.give("a", PURGE)
    clock.advance(61)
    assert refused(confirmations, token)


def test_force_is_needed_besides(confirmations: Confirmations) -> None:
    token, _ = confirmations.give("a", PURGE)
    with pytest.raises(FailedPrecondition) as caught:
        confirmations.use("a", token, PURGE, force=False)
    assert caught.value.details["field"] == "force"


def test_who_asks_for_many_takes_nothing_from_others(confirmations: Confirmations) -> None:
    """Before, ten thousand of one caller were all that there were, for a minute."""
    honest, _ = confirmations.give("honest", PURGE)
    tokens = [confirmations.give("a", PURGE)[0] for _ in range(OPEN_MAX + 1)]
    later, _ = confirmations.give("later", PURGE)
    assert not refused(confirmations, honest, caller="honest")
    assert not refused(confirmations, later, caller="later")
    assert refused(confirmations, tokens[0])
    assert not any(refused(confirmations, t) for t in tokens[-OPEN_PER_CALLER_MAX:])


def test_many_callers_together_are_bounded(confirmations: Confirmations) -> None:
    honest, _ = confirmations.give("honest", PURGE)
    for number in range(OPEN_MAX // OPEN_PER_CALLER_MAX + 2):
        for _ in range(OPEN_PER_CALLER_MAX):
            confirmations.give(f"c{number}", PURGE)
    assert len(confirmations._open) == OPEN_MAX
    assert not refused(confirmations, honest, caller="honest")


def test_what_expired_is_forgotten(confirmations: Confirmations, clock: ManualClock) -> None:
    for number in range(50):
        confirmations.give(f"c{number}", PURGE)
    clock.advance(61)
    for _ in range(OPEN_MAX):
        confirmations.give("a", PURGE)
        clock.advance(0.001)
    assert len(confirmations._open) == OPEN_PER_CALLER_MAX
