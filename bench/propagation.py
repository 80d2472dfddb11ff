"""What folding deltas costs: CPU µs per delta, by batch size, in order and not."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np

from penstock.demo.corpus import ALL_OPS, Corpus, CorpusOptions, generate
from penstock.model.columns import Binary
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_checks import validate
from penstock.propagation.fold.propagator import Propagator

DIMENSIONS = 128
ROWS_PER_MS = 100  # of log time

SHAPES: dict[str, dict] = {
    "in order, one writer": {"origins": 1},
    "in order, four writers": {"origins": 4},
    "20 % early, 10 % concurrent, 5 % twice": {
        "origins": 4, "disorder": 0.2, "concurrent": 0.1, "duplicates": 0.05,
    },
    "the same, all operations": {
        "origins": 4, "disorder": 0.2, "concurrent": 0.1, "duplicates": 0.05, "ops": ALL_OPS,
    },
}  # fmt: skip


def payloads(corpus: Corpus, size: int) -> Iterator[tuple[Binary, int]]:
    for first in range(0, len(corpus), size):
        yield corpus.chunk(first, min(first + size, len(corpus))).payloads, first + 1


def batch(payloads: Binary, first: int) -> DeltaBatch:
    numbers = np.arange(first, first + len(payloads))
    return DeltaBatch.of(
        payloads,
        sequences=numbers.astype(np.uint64),
        log_times_ms=1_767_225_600_000 + numbers // ROWS_PER_MS,
    )


def feeding(corpus: Corpus, size: int) -> tuple[float, float]:
    """CPU µs per delta: over all, and the median of the feeds."""
    fold, spent, each = Propagator(DIMENSIONS), 0.0, []
    for some, first in payloads(corpus, size):
        started = time.process_time()
        fold.feed(batch(some, first), through=first + len(some) - 1)
        took = time.process_time() - started
        spent += took
        each.append(took / len(some) * 1e6)
    return spent / len(corpus) * 1e6, statistics.median(each)


def feeding_few(corpus: Corpus) -> None:
    """CPU µs of feeds as a node makes them, of what was just committed, after a first large one."""
    print(f"\n{'feed a few, without states':<42} {'µs/feed':>9} {'µs/delta':>9}")
    for size in (1, 5, 20):
        fold, first = Propagator(DIMENSIONS), len(corpus) // 2 + 1
        fold.feed(batch(corpus.chunk(0, first - 1).payloads, 1), through=first - 1, states=False)
        each = []
        for at in range(first, min(first + 2000 * size, len(corpus) - size), size):
            some = batch(corpus.chunk(at - 1, at - 1 + size).payloads, at)
            started = time.process_time()
            fold.feed(some, through=at + size - 1, states=False)
            each.append((time.process_time() - started) * 1e6)
        median = statistics.median(each)
        print(f"{size:<42} {median:>9.1f} {median / size:>9.2f}")


def validating(corpus: Corpus) -> None:
    print(f"\n{'validate a batch of':<42} {'µs/batch':>9} {'µs/delta':>9}")
    for size in (1, 10, 100, 1000):
        some = corpus.chunk(0, size).payloads
        best = float("inf")
        for _ in range(200):
            started = time.perf_counter()
            validate(DeltaBatch.of(some), dimensions=DIMENSIONS, now_ms=1 << 45)
            best = min(best, time.perf_counter() - started)
        print(f"{size:<42} {best * 1e6:>9.1f} {best * 1e6 / size:>9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deltas", type=int, default=500_000)
    parser.add_argument("--vectors", type=int, default=100_000)
    arguments = parser.parse_args()
    print(f"{'feed':<42} {'batch':>6} {'all':>6} {'median':>7}   CPU µs per delta")
    for name, shape in SHAPES.items():
        options = CorpusOptions(deltas=arguments.deltas, vectors=arguments.vectors, **shape)
        corpus = generate(options)
        for size in (5_000, 50_000):
            total, median = feeding(corpus, size)
            print(f"{name:<42} {size:>6} {total:>6.2f} {median:>7.2f}")
        if not shape.get("disorder"):
            feeding_few(corpus)
    validating(corpus)


if __name__ == "__main__":
    main()
