import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.node.observe.metrics import OTHER, SERIES_MAX, Counter, Histogram, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """The scrape as a scraper reads it: (name, label values …) -> value."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_batch_counts_for_each_of_its_messages() -> None:
    metrics = Metrics()
    metrics.enqueue_seconds.observe(("jobs",), 0.003, 100)
    metrics.enqueue_seconds.observe(("jobs",), 0.2)
    found = samples(metrics)
    assert found["penstock_enqueue_seconds_count", "jobs"] == 101
    assert found["penstock_enqueue_seconds_sum", "jobs"] == pytest.approx(0.5)
    assert found["penstock_enqueue_seconds_bucket", "0.0025", "jobs"] == 0
    assert found["penstock_enqueue_seconds_bucket", "0.005", "jobs"] == 100
    assert found["penstock_enqueue_seconds_bucket", "+Inf", "jobs"] == 101


@pytest.mark.parametrize(("value", "bucket"), [(1.0, 0), (1.1, 1), (2.0, 1), (2.1, 2), (0.0, 0)])
def test_a_bound_belongs_to_its_bucket(value: float, bucket: int) -> None:
    histogram = Histogram("h", "help", bounds=(1.0, 2.0))
    histogram.observe((), value)
    counts = [sample.value for sample in histogram.collect().samples if "le" in sample.labels]
    assert counts == [float(at >= bucket) for at in range(3)]


def test_every_event_has_its_metric() -> None:
    metrics = Metrics()
    metrics.pop_seconds.observe(("jobs",), 0.01, 5)
    metrics.rank_error.observe(("jobs",), 3, 2)
    metrics.duplicates.add(("jobs",), 1)
    metrics.acked.add(("jobs",), 2)
    metrics.retried.add(("jobs",), 3)
    metrics.dead_lettered.add(("jobs", "retries"), 4)
    metrics.replayed.add(("jobs",), 5)
    metrics.leases_expired.add(("jobs",), 6)
    metrics.leases_lost.add(("jobs",), 7)
    metrics.log_written.add((), 4096)
    metrics.fsync_seconds.observe((), 0.001)
    metrics.snapshot_seconds.observe((), 0.5)
    metrics.requests.add(("pop", "OK"))
    metrics.request_seconds.observe(("pop",), 0.01)
    metrics.backpressure.add(("disk_full",))
    metrics.auth_failures.add()
    metrics.ingest_rejected.add(("vectors",), 40)
    metrics.ingest_crossings.add(("vectors",))
    found = samples(metrics)
    assert found["penstock_ingest_rejected_deltas_total", "vectors"] == 40
    assert found["penstock_ingest_high_water_crossings_total", "vectors"] == 1
    assert found["penstock_pop_seconds_count", "jobs"] == 5
    assert found["penstock_rank_error_bucket", "2.0", "jobs"] == 0
    assert found["penstock_rank_error_bucket", "5.0", "jobs"] == 2
    assert found["penstock_duplicate_messages_total", "jobs"] == 1
    assert found["penstock_acked_messages_total", "jobs"] == 2
    assert found["penstock_retried_messages_total", "jobs"] == 3
    assert found["penstock_dead_lettered_messages_total", "retries", "jobs"] == 4
    assert found["penstock_replayed_messages_total", "jobs"] == 5
    assert found["penstock_lease_expiries_total", "jobs"] == 6
    assert found["penstock_lease_lost_total", "jobs"] == 7
    assert found["penstock_log_written_bytes_total",] == 4096
    assert found["penstock_fsync_seconds_count",] == 1
    assert found["penstock_snapshot_seconds_count",] == 1
    assert found["penstock_requests_total", "pop", "OK"] == 1
    assert found["penstock_request_seconds_count", "pop"] == 1
    assert found["penstock_backpressure_total", "disk_full"] == 1
    assert found["penstock_auth_failures_total",] == 1


def test_a_scrape_works_before_the_engine_does() -> None:
    found = samples(Metrics(node="n1"))
    assert found["penstock_fsync_seconds_count",] == 0
    assert any(key[0] == "penstock_build_info" and "n1" in key for key in found)
    assert found["process_resident_memory_bytes",] > 0


def test_a_topic_starts_at_zero_and_leaves_without_trace() -> None:
    metrics = Metrics()
    metrics.begin_topic("jobs")
    metrics.begin_topic("other")
    assert samples(metrics)["penstock_acked_messages_total", "jobs"] == 0
    metrics.dead_lettered.add(("jobs", "rejected"))
    metrics.forget_topic("jobs")
    left = [key for key in samples(metrics) if "jobs" in key]
    assert left == []
    assert ("penstock_acked_messages_total", "other") in samples(metrics)


def test_beginning_a_topic_twice_keeps_its_count() -> None:
    metrics = Metrics()
    metrics.acked.add(("jobs",), 3)
    metrics.begin_topic("jobs")
    assert samples(metrics)["penstock_acked_messages_total", "jobs"] == 3


def test_nodes_in_one_process_count_apart() -> None:
    first, second = Metrics(node="a"), Metrics(node="b")
    first.acked.add(("jobs",))
    assert ("penstock_acked_messages_total", "jobs") not in samples(second)


def test_the_number_of_series_is_bounded() -> None:
    counter = Counter("c", "help", "name")
    for n in range(SERIES_MAX + 5):
        counter.add((str(n),))
    assert len(counter.collect().samples) == SERIES_MAX + 1
    assert [s.value for s in counter.collect().samples if OTHER in s.labels.values()] == [5]
