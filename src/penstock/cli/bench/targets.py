"""What is measured, and what it should come to on two shared cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Metric:
    """`target` must be met; `aim` is what the design should allow."""

    name: str
    stage: str
    unit: str
    target: float
    aim: float | None = None
    more_is_better: bool = True

    def met(self, value: float) -> bool:
        return value >= self.target if self.more_is_better else value <= self.target


def _at_least(name: str, stage: str, target: float, aim: float | None = None) -> Metric:
    return Metric(name, stage, "messages/s", target, aim)


def _at_most(name: str, stage: str, unit: str, target: float) -> Metric:
    return Metric(name, stage, unit, target, more_is_better=False)


METRICS: Final = (
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
STAGES: Final = tuple(dict.fromkeys(metric.stage for metric in METRICS))

PIPELINE_METRICS: Final = (
    Metric("read_per_s", "read", "deltas/s", 300_000, 600_000),
    Metric("ordered_per_s", "ordered", "deltas/s", 150_000, 300_000),
    Metric("full_per_s", "full", "deltas/s", 40_000, 80_000),
    _at_most("freshness_s_p95", "freshness", "s", 5),
)
PIPELINE_STAGES: Final = tuple(dict.fromkeys(metric.stage for metric in PIPELINE_METRICS))

CLUSTER_METRICS: Final = (
    _at_least("enqueue_batch100_per_s", "enqueue", 60_000),
    _at_least("pop_ack_batch100_per_s", "pop", 40_000),
    _at_least("put_single_per_s", "put", 6_000),
    _at_most("enqueue_ms_p95", "latency", "ms", 20),
    _at_most("pop_ms_p95", "latency", "ms", 50),
    _at_most("failover_s_p99", "failover", "s", 5),
    Metric("slow_follower_ratio", "slow", "", 0.9),
)
CLUSTER_STAGES: Final = tuple(dict.fromkeys(metric.stage for metric in CLUSTER_METRICS))
