"""How a sink fares: freshness in buckets, and when it is tried again."""

import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.sinks.health import BOUNDS_S, GROWTH, WINDOW_S, Freshness, Patience, Retry
from penstock.spark.settings import DeliveryOptions


def test_percentiles_are_within_a_bucket_of_the_truth() -> None:
    freshness = Freshness()
    seconds = np.random.default_rng(1).lognormal(0, 2, 100_000)
    freshness.record(seconds, now=0.0)
    found = freshness.recent(now=1.0)
    for percent in (50, 95, 99):
        truth = float(np.percentile(seconds, percent))
        assert truth <= found[f"p{percent}"] * 1.0001 <= truth * GROWTH * 1.001
    assert found["max"] == round(float(seconds.max()), 6)
    assert found["rows"] == 100_000


def test_old_windows_are_forgotten_and_the_counts_stay() -> None:
    freshness = Freshness()
    freshness.record(np.array([5.0]), now=0.0)
    assert freshness.recent(now=WINDOW_S + 1)["p50"] == 5.0
    assert freshness.recent(now=2 * WINDOW_S + 1) == {}
    assert (freshness.counts.sum(), freshness.seconds_sum) == (1, 5.0)


def test_a_clock_ahead_of_ours_counts_as_no_time() -> None:
    freshness = Freshness()
    freshness.record(np.array([-3.0]), now=0.0)
    assert freshness.recent(now=0.0)["max"] == 0.0


def test_what_takes_for_ever_is_counted_too() -> None:
    freshness = Freshness()
    freshness.record(np.array([1e9]), now=0.0)
    assert freshness.counts[len(BOUNDS_S)] == 1
    assert freshness.recent(now=0.0)["p99"] == 1e9


def test_the_options_say_when_the_breaker_opens_and_for_how_long() -> None:
    retry = Retry(DeliveryOptions(breaker_failures=3, breaker_open_s=4.0, backoff_s_base=0.01))
    assert [retry.failed(now=float(at)) for at in range(3)] == [False, False, True]
    assert retry.describe(now=2.0)["retry_in_s"] == 4.0
    assert retry.delay_s(now=6.5) == 0.0
    assert retry.breaker_state == "half_open"
    retry.succeeded()
    assert (retry.breaker_state, retry.failures) == ("closed", 0)


def test_without_options_it_opens_at_the_tenth_failure_for_half_a_minute() -> None:
    retry = Retry(DeliveryOptions())
    assert [retry.failed(now=0.0) for _ in range(10)].index(True) == 9
    assert retry.describe(now=0.0)["retry_in_s"] == 30.0


def failed(times: int, *, now: float = 0.0) -> Retry:
    retry = Retry(Patience(backoff_s_cap=0.0))
    for _ in range(times):
        retry.failed(now=now)
    return retry


def test_a_success_starts_the_count_anew() -> None:
    retry = failed(9)
    retry.succeeded()
    assert not retry.failed(now=2.0)
    assert (retry.breaker_state, retry.failures) == ("closed", 1)


def test_it_probes_after_a_while_and_believes_what_it_sees() -> None:
    retry = failed(10)
    assert not retry.delay_s(now=30.0) and retry.breaker_state == "half_open"
    assert retry.failed(now=31.0)
    assert retry.breaker_state == "open" and retry.delay_s(now=40.0) == pytest.approx(21.0)
    assert not retry.delay_s(now=61.0)
    retry.succeeded()
    assert retry.breaker_state == "closed" and retry.delay_s(now=61.0) == 0.0


def test_a_failure_while_open_does_not_prolong_it() -> None:
    retry = failed(10)
    assert not retry.failed(now=20.0)
    assert not retry.delay_s(now=30.0)


@pytest.mark.parametrize("bad", [{"breaker_failures": 0}, {"breaker_open_s": 0.0}])
def test_a_breaker_has_bounds(bad: dict) -> None:
    with pytest.raises(InvalidArgument):
        Retry(Patience(**bad))


@pytest.mark.parametrize("name", DeliveryOptions.__struct_fields__)
def test_no_option_may_be_nothing(name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        DeliveryOptions(**{name: 0}).validate()
    assert refused.value.field == name
