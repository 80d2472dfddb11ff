"""Quantiles of what the status shows."""

from penstock.node.live.timings import KEPT, Timings


def test_quantiles_count_rows_and_not_feeds() -> None:
    timings = Timings()
    timings.record(0.001, rows=1)
    timings.record(0.0001, rows=98)
    timings.record(0.002, rows=1)
    found = timings.summary()
    assert (found["p50_us"], found["p99_us"], found["count"]) == (100.0, 1000.0, 100)


def test_only_the_last_ones_count() -> None:
    timings = Timings()
    assert timings.summary() == {"count": 0, "p50_us": None, "p95_us": None, "p99_us": None}
    for _ in range(KEPT):
        timings.record(0.5, rows=1)
    for _ in range(KEPT):
        timings.record(0.000_25, rows=2)
    found = timings.summary()
    assert (found["p50_us"], found["p99_us"], found["count"]) == (250.0, 250.0, 3 * KEPT)
