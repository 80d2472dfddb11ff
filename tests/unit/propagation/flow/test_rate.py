from collections.abc import Callable
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.propagation.flow.rate import AdaptiveRate, TokenBucket


@pytest.mark.parametrize(
    ("utilisation", "expected"), [(0.95, 500), (0.8, 900), (0.5, 1000), (0.2, 1100), (7.0, 500)]
)
def test_the_rate_follows_utilisation(utilisation: float, expected: float) -> None:
    rate = AdaptiveRate(initial=1000, minimum=1, maximum=9999)
    assert rate.adjust(utilisation, gain=2.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("utilisation", "expected"), [(0.95, 500), (0.8, 900), (0.6, 1000), (0.4, 1100)]
)
def test_what_it_alone_holds_back_raises_it_earlier(utilisation: float, expected: float) -> None:
    rate = AdaptiveRate(initial=1000, minimum=1, maximum=9999)
    assert rate.adjust(utilisation, gain=2.0, held=True) == pytest.approx(expected)


def test_a_small_gain_takes_a_part_of_the_step() -> None:
    rate = AdaptiveRate(initial=1000, minimum=1, maximum=9999)
    assert rate.adjust(1.0, gain=0.5) == pytest.approx(875)


def test_the_rate_stays_within_its_bounds() -> None:
    rate = AdaptiveRate(initial=100, minimum=90, maximum=110)
    for utilisation in [1.0] * 50 + [0.0] * 50:
        rate.adjust(utilisation)
        rate.validate()
    assert rate.rate == pytest.approx(110)


@pytest.mark.parametrize(
    ("bad", "field"),
    [({"initial": 0}, "initial"), ({"minimum": 0}, "minimum"), ({"maximum": 1}, "minimum")],
)
def test_settings_have_bounds(bad: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        AdaptiveRate(**{"initial": 10, "minimum": 5, "maximum": 20, **bad})
    assert caught.value.field == field


def test_utilisation_is_a_number() -> None:
    with pytest.raises(InvalidArgument):
        AdaptiveRate(initial=10, minimum=5, maximum=20).adjust(float("nan"))


MINIMUM, MAXIMUM = 10.0, 1e6
TICK_MS = 10


def bucket(initial: float = 1000.0) -> TokenBucket:
    return TokenBucket(AdaptiveRate(initial=initial, minimum=MINIMUM, maximum=MAXIMUM))


def rates_with(
    capacity: Callable[[float], float],
    *,
    seconds: int = 60,
    room: int = 2000,
    initial: float = 1e3,
    tells: bool = False,
) -> tuple[list[float], float]:
    """A sink with a queue, and capacity that changes: rates by tick, and the throughput per s.

    There is always more to send. With `tells` the bucket hears that it held that back.
    """
    found, now_ms, queue, done = bucket(initial), 0.0, 0.0, 0.0
    rates = []
    for _ in range(seconds * 1000 // TICK_MS):
        now_ms += TICK_MS
        wanted = int(room - queue)
        given = found.take(wanted, now_ms)
        queue += given
        served = min(queue, capacity(now_ms) * TICK_MS / 1000)
        queue, done = queue - served, done + served
        found.held &= tells
        rates.append(found.observe(queue / room, now_ms))
        found.validate()
    return rates, done / seconds


def swinging(period_ms: float, swing: float) -> Callable[[float], float]:
    return lambda now_ms: 1e4 * (1 + swing * (1 if now_ms % period_ms < period_ms / 2 else -1))


def spread(rates: list[float]) -> float:
    return (max(rates) - min(rates)) / mean(rates)


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("room", [500, 2000, 20_000])
@pytest.mark.parametrize("initial", [100.0, 1e6])
def test_the_rate_settles_on_what_the_sink_bears(room: int, initial: float, tells: bool) -> None:
    rates, _ = rates_with(lambda _: 1e4, room=room, initial=initial, seconds=120, tells=tells)
    last = rates[-2000:]
    assert spread(last) < 0.1
    assert mean(last) == pytest.approx(1e4, rel=0.05)


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize(("period_ms", "swing"), [(40, 0.9), (200, 0.5), (200, 0.9), (400, 0.3)])
def test_a_swinging_sink_starts_no_storm(period_ms: float, swing: float, tells: bool) -> None:
    rates, throughput = rates_with(swinging(period_ms, swing), seconds=90, tells=tells)
    warm, last = rates[1000:3000], rates[-2000:]
    assert spread(last) < swing * (0.6 if tells else 0.5)
    assert spread(last) <= spread(warm) + 0.05
    assert min(rates[1000:]) > 0.5 * 1e4
    assert throughput > 0.85 * 1e4


def test_a_slow_swing_is_followed_within_its_bounds() -> None:
    rates, throughput = rates_with(swinging(20_000, 0.5), seconds=120)
    assert min(rates[2000:]) > 0.15 * 1e4
    assert max(rates[2000:]) < 2 * 1e4
    assert throughput > 0.7 * 1e4


def test_a_sink_that_slows_down_is_given_less() -> None:
    rates, _ = rates_with(lambda now_ms: 1e4 if now_ms < 60_000 else 500.0, seconds=180)
    assert mean(rates[5000:6000]) == pytest.approx(1e4, rel=0.1)
    assert mean(rates[-1000:]) == pytest.approx(500, rel=0.1)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300), st.floats(0, 2)), max_size=60))
def test_no_more_is_given_out_than_flows_in(story: list[tuple[int, int, float]]) -> None:
    found, now_ms, allowed, given_out = bucket(200.0), 0.0, 20.0, 0
    for pause_ms, wanted, utilisation in story:
        allowed += found.rate.rate * pause_ms / 1000
        now_ms += pause_ms
        given_out += found.take(wanted, now_ms)
        found.observe(utilisation, now_ms)
        found.validate()
        assert given_out <= allowed + 1e-6


def test_a_token_comes_when_it_was_said() -> None:
    found = bucket(100.0)
    assert found.take(99, 0) == 10
    wait_ms = found.wait_ms(0)
    assert wait_ms == pytest.approx(10)
    assert found.take(1, wait_ms - 0.1) == 0
    assert found.take(1, wait_ms + 0.1) == 1
    found.give_back(1)
    assert found.wait_ms(wait_ms + 0.1) == 0


def test_several_observations_make_one_adjustment() -> None:
    found = bucket()
    rates = {found.observe(1.0, now_ms) for now_ms in range(0, 100, 5)}
    assert rates == {1000.0}
    assert found.observe(1.0, 100) == pytest.approx(750)


@pytest.mark.parametrize(
    ("utilisation", "held", "expected"),
    [(0.4, False, 1000), (0.4, True, 1050), (0.6, True, 1000), (0.8, True, 950)],
)
def test_it_goes_on_as_long_as_it_alone_holds_things_back(
    utilisation: float, held: bool, expected: float
) -> None:
    found = bucket()
    found.held = held
    found.observe(utilisation, 0)
    assert found.observe(utilisation, 100) == pytest.approx(expected)
    assert found.observe(0.4, 200) == pytest.approx(expected), "that was said of one stretch"


def test_what_a_bucket_observes_is_a_number() -> None:
    with pytest.raises(InvalidArgument):
        bucket().observe(float("nan"), 0)
