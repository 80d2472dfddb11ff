"""The demo's record of what it saw."""

import pytest

from penstock.demo.picture.samples import (
    Recording,
    Sample,
    Sighting,
    SinkSample,
    Span,
    quantile,
    rates,
)


def sample(at: float, *, released: int = 0, breaker: str = "closed", lag: float = 0.0) -> Sample:
    sink = SinkSample(name="shop", lag_s=lag, rows=0, breaker=breaker)
    return Sample(at=at, written=0, released=released, sinks=(sink,))


def test_rates_are_growth_per_second() -> None:
    samples = [sample(0.0), sample(0.5, released=100), sample(2.5, released=100)]
    assert rates(samples, "released") == ([0.5, 2.5], [200.0, 0.0])
    assert rates(samples[:1], "released") == ([], [])


def test_rates_over_a_while_are_smooth() -> None:
    samples = [sample(at, released=100 * (at // 2)) for at in range(9)]  # every other second
    assert set(rates(samples, "released")[1]) == {0.0, 100.0}
    assert set(rates(samples, "released", over_s=4.0)[1][4:]) == {50.0}


def test_what_there_is_to_see_begins_before_the_first_release() -> None:
    recording = Recording([sample(at, released=max(0, at - 20)) for at in range(40)])
    assert (recording.begin, recording.end) == (16.0, 39)
    assert Recording().begin == 0.0


def test_a_counter_that_starts_anew_is_no_negative_rate() -> None:
    """A restarted pipeline counts from zero again."""
    assert rates([sample(0, released=50), sample(1, released=3)], "released") == ([1], [0.0])


def test_breaker_states_follow_each_other_without_a_gap() -> None:
    states = ["closed", "closed", "open", "open", "half-open", "closed"]
    recording = Recording([sample(at, breaker=state) for at, state in enumerate(states)])
    assert recording.breaker_spans("shop") == [
        Span(0, 1, "closed"), Span(1, 3, "open"), Span(3, 4, "half-open"), Span(4, 5, "closed"),
    ]  # fmt: skip
    assert recording.breaker_spans("nobody") == []


def test_a_sink_may_appear_late() -> None:
    recording = Recording([Sample(at=0, written=0, released=0), sample(1, lag=2.5)])
    assert recording.sink_names() == ["shop"]
    assert recording.lags("shop") == ([1], [2.5])


def test_latencies_are_told_apart_by_class() -> None:
    probes = [
        Sighting(lane="LOW", put_at=1, seen_at=9),
        Sighting(lane="CRITICAL", put_at=2, seen_at=3),
        Sighting(lane="LOW", put_at=2, seen_at=4),
    ]
    recording = Recording(probes=probes)
    assert recording.lanes() == ["LOW", "CRITICAL"]
    assert (recording.took("LOW"), recording.took("CRITICAL")) == ([2, 8], [1])


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1), (0.5, 2), (0.75, 3), (0.95, 4), (1.0, 4)])
def test_quantile_is_one_of_the_values(q: float, expected: float) -> None:
    assert quantile([4, 2, 3, 1], q) == expected
    assert quantile([], q) == 0.0
