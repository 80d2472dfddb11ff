"""What is measured, and what it should come to on two shared cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Metric:
    """`target` must be met; `aim` is what the design should allow. Without a target it is only
    told, beside a `reference`: what the design document for a compiled language hopes for."""

    name: str
    stage: str
    unit: str
    target: float | None
    aim: float | None = None
    more_is_better: bool = True
    reference: float | None = None
    of_worst_run: bool = False  # and not the median: it says whether a run was valid

    def met(self, value: float | None) -> bool:
        """None: it was not measured."""
        if self.target is None:
            return True
        if value is None:
            return False
        return value >= self.target if self.more_is_better else value <= self.target


def _at_least(name: str, stage: str, target: float, aim: float | None = None) -> Metric:
    return Metric(name, stage, "messages/s", target, aim)


def _at_most(name: str, stage: str, unit: str, target: float) -> Metric:
    return Metric(name, stage, unit, target, more_is_better=False)


QUEUE_METRICS: Final = (
    _at_least("enqueue_batch100_per_s", "enqueue", 200_000, 300_000),
    _at_least("pop_ack_batch100_per_s", "pop", 120_000, 200_000),
    _at_least("put_single_per_s", "put", 15_000, 30_000),
    _at_most("server_cpu_us_per_enqueue", "enqueue", "µs", 4),
    _at_most("server_cpu_us_per_pop_ack", "pop", "µs", 7),
    _at_most("end_to_end_ms_p50", "latency", "ms", 3),
    _at_most("end_to_end_ms_p95", "latency", "ms", 20),
    _at_most("backlog_2m_recover_s", "backlog", "s", 5),
    _at_most("backlog_2m_rss_mb", "backlog", "MB", 700),
    _at_least("grpc_enqueue_batch100_per_s", "grpc", 75_000),
    _at_least("http_put_single_per_s", "http", 4_000),
)

PIPELINE_METRICS: Final = (
    Metric("read_per_s", "read", "deltas/s", 300_000, 700_000),
    Metric("ordered_per_s", "ordered", "deltas/s", 300_000, 450_000),
    Metric("full_per_s", "full", "deltas/s", 100_000, 200_000),
    _at_most("driver_cpu_share", "full", "", 0.1),
    Metric("write_deltas_per_s", "write", "deltas/s", 200_000),
    _at_most("state_bytes_per_vector", "state", "bytes", 700),
    _at_most("freshness_s_p95", "freshness", "s", 2),
)

PIPELINE_SCALE_METRICS: Final = (
    *(Metric(f"tasks{n}_per_s", "tasks", "deltas/s", None) for n in (1, 2, 4)),
    Metric("tasks_ratio", "tasks", "", None),
    *(
        Metric(f"vectors{n}m_{key}", "vectors", unit, None, more_is_better=key == "per_s")
        for n in (1, 4, 10)
        for key, unit in (("per_s", "vectors/s"), ("state_bytes", "bytes"), ("memory_mb", "MB"))
    ),
    Metric("vectors_rate_ratio", "vectors", "", 0.8),
    _at_most("vectors_state_ratio", "vectors", "", 1.1),
    _at_most("vectors_memory_ratio", "vectors", "", 1.1),
)

CLUSTER_METRICS: Final = (
    _at_least("enqueue_batch100_per_s", "enqueue", 60_000),
    _at_least("pop_ack_batch100_per_s", "pop", 40_000),
    _at_least("put_single_per_s", "put", 6_000),
    _at_most("enqueue_ms_p95", "latency", "ms", 20),
    _at_most("pop_ms_p95", "latency", "ms", 50),
    _at_most("failover_s_p99", "failover", "s", 5),
    Metric("slow_follower_ratio", "slow", "", 0.9),
)


OFFERED_SHARE_MIN: Final = 0.95  # of the load that a stage is meant to have
SINK_PER_S: Final = 5_000
SUBSCRIBER_PER_S: Final = 1_000
MEMORY_PER_S: Final = 1_000
CACHE_PER_S: Final = 1_000


def _live(name: str, stage: str, reference: float, target: float | None = None) -> Metric:
    return Metric(name, stage, "µs", target, more_is_better=False, reference=reference)


def _handed(size: int, reference: float, target: float | None = None) -> Metric:
    return Metric(f"sink_batch{size}_per_s", "batches", "deltas/s", target, reference=reference)


def offered(stage: str, per_s: int) -> Metric:
    """The load under which a stage was measured. Below its bound the run says nothing."""
    name, least = f"{stage}_offered_per_s", OFFERED_SHARE_MIN * per_s
    return Metric(name, stage, "deltas/s", least, of_worst_run=True)


def _told(name: str, stage: str) -> tuple[Metric, ...]:
    """Quantiles of which nobody has said what they should be."""
    return tuple(
        Metric(f"{name}_{quantile}", stage, "µs", None, more_is_better=False)
        for quantile in ("p50", "p95", "p99")
    )


LIVE_METRICS: Final = (
    offered("sink", SINK_PER_S),
    _live("commit_to_sink_us_p50", "sink", 175, 175),
    _live("commit_to_sink_us_p95", "sink", 780),
    _live("commit_to_sink_us_p99", "sink", 3300, 3300),
    _live("ingest_us_p50", "kernels", 5),
    _live("ingest_us_p95", "kernels", 15),
    _live("ingest_us_p99", "kernels", 50),
    *_told("arrival_to_staged_us", "sink"),
    _live("order_us_p50", "sink", 10),
    _live("order_us_p95", "sink", 30),
    _live("order_us_p99", "sink", 100),
    _live("route_us_p50", "sink", 8),
    _live("route_us_p95", "sink", 25),
    _live("route_us_p99", "sink", 80),
    _live("cache_us_p50", "kernels", 2),
    _live("cache_us_p95", "kernels", 10),
    _live("cache_us_p99", "kernels", 30),
    _live("index_us_p50", "kernels", 50),
    _live("index_us_p95", "kernels", 200),
    _live("index_us_p99", "kernels", 1000),
    offered("subscriber", SUBSCRIBER_PER_S),
    _at_most("put_to_subscriber_ms_p50", "subscriber", "ms", 1.5),
    Metric("put_to_subscriber_ms_p95", "subscriber", "ms", None, more_is_better=False),
    Metric("put_to_subscriber_ms_p99", "subscriber", "ms", None, more_is_better=False),
    *_told("commit_to_subscriber_us", "subscriber"),
    offered("memory", MEMORY_PER_S),
    *_told("commit_to_memory_us", "memory"),
    offered("cache", CACHE_PER_S),
    *_told("commit_to_cache_us", "cache"),
    _handed(1, 50_000),
    _handed(10, 200_000),
    _handed(100, 500_000),
    _handed(1000, 800_000, 500_000),
    Metric("stalled_subscriber_ratio", "stalled", "", 0.9),
    _at_most("stalled_growth_mb", "stalled", "MB", 64),
    Metric("stalled_peak_growth_mb", "stalled", "MB", None, more_is_better=False),
    Metric("free_peak_growth_mb", "stalled", "MB", None, more_is_better=False),
    Metric("fan_out_per_s", "stalled", "deltas/s", None),
)
