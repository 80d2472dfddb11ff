import pytest

from penstock.errors import InvalidArgument
from penstock.propagation.flow.breaker import Breaker, BreakerState


def failed(times: int, *, now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(times):
        breaker.failed(now)
        breaker.validate()
    return breaker


def test_it_opens_at_the_tenth_failure_in_a_row() -> None:
    assert failed(9).state is BreakerState.CLOSED and not failed(9).wait_s(0.0)
    breaker = failed(10, now=5.0)
    assert breaker.state is BreakerState.OPEN and breaker.wait_s(5.0)
    assert breaker.wait_s(20.0) == pytest.approx(15.0)


def test_a_success_starts_the_count_anew() -> None:
    breaker = failed(9)
    breaker.succeeded()
    breaker.failed(2.0)
    assert breaker.state is BreakerState.CLOSED and breaker.failures == 1


def test_it_probes_after_a_while_and_believes_what_it_sees() -> None:
    breaker = failed(10)
    assert not breaker.wait_s(30.0) and breaker.state is BreakerState.HALF_OPEN
    breaker.failed(31.0)
    assert breaker.state is BreakerState.OPEN and breaker.wait_s(40.0) == pytest.approx(21.0)
    assert not breaker.wait_s(61.0)
    breaker.succeeded()
    breaker.validate()
    assert breaker.state is BreakerState.CLOSED and breaker.wait_s(61.0) == 0.0


def test_a_failure_while_open_does_not_prolong_it() -> None:
    breaker = failed(10)
    breaker.failed(20.0)
    assert not breaker.wait_s(30.0)


@pytest.mark.parametrize("bad", [{"failures_max": 0}, {"open_s": 0.0}])
def test_settings_have_bounds(bad: dict) -> None:
    with pytest.raises(InvalidArgument):
        Breaker(**bad)
