"""Confirmation tokens: one use, one subject, one minute."""

import pytest

from penstock.errors import FailedPrecondition
from penstock.node.clock import ManualClock
from penstock.node.confirmations import Confirmations


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ms=0)


@pytest.fixture
def confirmations(clock: ManualClock) -> Confirmations:
    return Confirmations(clock)


def test_a_token_is_good_once(confirmations: Confirmations) -> None:
    token, _ = confirmations.give("purge", "orders")
    confirmations.use(token, "purge", "orders", force=True)
    with pytest.raises(FailedPrecondition, match="confirmation"):
        confirmations.use(token, "purge", "orders", force=True)


@pytest.mark.parametrize(("method", "subject"), [("topic_delete", "orders"), ("purge", "invoices")])
def test_a_token_is_good_for_nothing_else(
    confirmations: Confirmations, method: str, subject: str
) -> None:
    token, _ = confirmations.give("purge", "orders")
    with pytest.raises(FailedPrecondition):
        confirmations.use(token, method, subject, force=True)


def test_a_token_expires(confirmations: Confirmations, clock: ManualClock) -> None:
    token, _ = confirmations.give("purge", "orders")
    clock.advance(61)
    with pytest.raises(FailedPrecondition):
        confirmations.use(token, "purge", "orders", force=True)


def test_force_is_needed_besides(confirmations: Confirmations) -> None:
    token, _ = confirmations.give("purge", "orders")
    with pytest.raises(FailedPrecondition) as caught:
        confirmations.use(token, "purge", "orders", force=False)
    assert caught.value.details["field"] == "force"
