"""What the heap core costs: µs per batch, by batch size, over a backlog."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from penstock.heap.machine import Heap
from penstock.model.batch import SCHEMAS, Batch, Kind, seal
from penstock.model.topic import TopicConfig

TIME_MS = 1_800_000_000_000


class Bench:
    """A heap and the log position that its next batch takes."""

    def __init__(self) -> None:
        self.heap = Heap(TopicConfig(name="bench", id=1), partition=0)
        self.random = np.random.default_rng(1)

    def batch(self, kind: Kind, count: int, values: dict, *, runs: int = 0) -> Batch:
        body = SCHEMAS[kind].encode(count, values, runs=runs)
        return seal(
            kind, body, topic=1, partition=0, epoch=1, epoch_previous=1,
            first=self.heap.sequence_applied + 1, count=count, time_ms=TIME_MS, chain_previous=0,
        )  # fmt: skip

    def enqueued(self, count: int) -> Batch:
        priorities = self.random.integers(0, 10, count)
        return self.batch(Kind.ENQ, count, {"priority": priorities, "payload": [b""] * count})

    def leased(self, messages: np.ndarray) -> Batch:
        values = {
            "message": messages,
            "run_count": [len(messages)],
            "run_visibility_ms": [30_000],
            "run_consumer": [b"bench"],
        }
        return self.batch(Kind.LEASE, len(messages), values, runs=1)

    def apply(self, batch: Batch) -> None:
        self.heap.apply(batch, batch.columns(), TIME_MS)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


def rounds(bench: Bench, size: int, times: int) -> Iterator[tuple[float, float, float]]:
    for _ in range(times):
        batch = bench.enqueued(size)
        enqueue = timed(lambda batch=batch: bench.apply(batch))
        found: list[np.ndarray] = []
        lease = timed(lambda found=found: found.append(bench.heap.select(size, TIME_MS)))
        batch = bench.leased(found[0])
        lease += timed(lambda batch=batch: bench.apply(batch))
        tokens = np.arange(batch.first, batch.last + 1, dtype=np.uint64)
        acked = bench.batch(Kind.ACK, size, {"token": tokens})
        yield enqueue, lease, timed(lambda acked=acked: bench.apply(acked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backlog", type=int, default=200_000)
    parser.add_argument("--times", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"{'batch':>6} {'enqueue':>9} {'select+lease':>13} {'ack':>9}   median µs per batch")
    for size in (1, 10, 100, 1000):
        bench = Bench()
        for _ in range(arguments.backlog // 1000):
            bench.apply(bench.enqueued(1000))
        columns = zip(*rounds(bench, size, arguments.times), strict=True)
        enqueue, lease, ack = (statistics.median(column) for column in columns)
        print(f"{size:>6} {enqueue:>9.1f} {lease:>13.1f} {ack:>9.1f}")


if __name__ == "__main__":
    main()
