"""What several writers wrote, with parents and clocks as their knowledge of a vector makes them.

A vector's deltas fall into *rounds*. A writer of a round has seen every earlier round of that
vector and nothing of its own round; so deltas of one round are concurrent, and each round has at
most one delta per origin (a writer knows its own). From that follow

- clock: per origin, the number of that origin's deltas of this vector in earlier rounds, and one
  more for the writer itself;
- parent: the last delta of the round before, or none in the first round;
- time: later than everything in earlier rounds. Within a round times are as written, reversed, or
  all the same, so that the last writer is not simply the last to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.model.delta import Op


@dataclass(frozen=True, kw_only=True)
class HistoryOptions:
    deltas: int
    vectors: int
    origins: int
    concurrent: float
    ops: Mapping[Op, float]
    priorities: tuple[float, ...]
    start_ms: int
    writes_per_ms: int


@dataclass(frozen=True)
class History:
    """Columns of the distinct deltas in the order in which they were written."""

    vector: NDArray[np.int64]
    op: NDArray[np.uint8]
    priority: NDArray[np.uint8]
    origin: NDArray[np.int64]
    parent: NDArray[np.int64]  # index of the parent, -1: none
    time: NDArray[np.int64]  # hybrid
    clock: NDArray[np.int32]  # (deltas, origins), 0: nothing seen
    delta_id: NDArray[np.uint8]  # (deltas, 16)
    concurrent: int  # deltas written without having seen the one before

    def __len__(self) -> int:
        return len(self.vector)


@dataclass(frozen=True)
class _Rounds:
    """The deltas sorted by vector, in the order of writing; all columns are in that order."""

    rows: NDArray[np.int64]  # where each lies in the order of writing
    first: NDArray[np.int64]  # index of the vector's first delta
    start: NDArray[np.int64]  # index of the round's first delta
    end: NDArray[np.int64]  # index of the round's last delta
    rank: NDArray[np.int64]  # place within the round
    concurrent: int


def write(rng: np.random.Generator, options: HistoryOptions) -> History:
    """Draw a history. Every vector is written at least once if there are deltas enough."""
    count = options.deltas
    vector = np.concatenate(
        [
            rng.permutation(options.vectors)[:count],
            rng.integers(0, options.vectors, max(0, count - options.vectors)),
        ]
    )
    rng.shuffle(vector)
    rounds = _rounds(rng, vector, options)
    origin = (rng.integers(0, options.origins, count)[rounds.start] + rounds.rank) % options.origins
    columns = {
        "origin": origin,
        "parent": np.where(rounds.start > rounds.first, rounds.rows[rounds.start - 1], -1),
        "time": _times(rng, rounds, options),
        "clock": _clocks(rounds, origin, options.origins),
        "op": _ops(rng, rounds, options.ops),
    }
    written = {}
    for name, column in columns.items():
        written[name] = np.empty_like(column)
        written[name][rounds.rows] = column
    weights = np.cumsum(options.priorities) / sum(options.priorities)
    return History(
        vector=vector,
        priority=np.searchsorted(weights, rng.random(count), side="right").astype(np.uint8),
        delta_id=np.frombuffer(rng.bytes(16 * count), np.uint8).reshape(count, 16),
        concurrent=rounds.concurrent,
        **written,
    )


def _rounds(
    rng: np.random.Generator, vector: NDArray[np.int64], options: HistoryOptions
) -> _Rounds:
    rows = np.argsort(vector, kind="stable")
    at = np.arange(len(rows))
    begins = np.ones(len(rows), bool)
    begins[1:] = np.diff(vector[rows]) != 0
    share = options.concurrent * len(rows) / max(1, int(np.count_nonzero(~begins)))
    joins = (rng.random(len(rows)) < share) & ~begins
    rank = (at - _latest(~joins)) % options.origins
    opens = ~joins | (rank == 0)
    start = _latest(opens)
    starts = np.flatnonzero(opens)
    end = np.append(starts[1:], len(rows))[np.cumsum(opens) - 1] - 1
    concurrent = len(rows) - len(starts)
    return _Rounds(rows, _latest(begins), start, end, rank, concurrent)


def _latest(marked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each place, the last marked place up to it."""
    latest: NDArray[np.int64] = np.maximum.accumulate(np.where(marked, np.arange(len(marked)), 0))
    return latest


def _clocks(rounds: _Rounds, origin: NDArray[np.int64], origins: int) -> NDArray[np.int32]:
    at = np.arange(len(origin))
    before = np.zeros((len(origin) + 1, origins), np.int32)
    before[at + 1, origin] = 1
    np.cumsum(before, axis=0, out=before)
    clock: NDArray[np.int32] = before[rounds.start] - before[rounds.first]
    clock[at, origin] += 1
    return clock


def _times(rng: np.random.Generator, rounds: _Rounds, options: HistoryOptions) -> NDArray[np.int64]:
    """Hybrid times: milliseconds, then a counter of the writes within one."""
    at = np.arange(len(rounds.rows))
    manner = rng.integers(0, 3, len(at))[rounds.start]
    source = np.choose(manner, [at, rounds.start + rounds.end - at, rounds.start])
    milliseconds, counter = np.divmod(rounds.rows[source], options.writes_per_ms)
    time: NDArray[np.int64] = (options.start_ms + milliseconds) << 16 | counter
    return time


def _ops(
    rng: np.random.Generator, rounds: _Rounds, weights: Mapping[Op, float]
) -> NDArray[np.uint8]:
    """Operations by weight; a vector's first is CREATE if that is among them."""
    kinds = np.array(list(weights), np.uint8)
    shares = np.cumsum(list(weights.values()))
    count = len(rounds.rows)
    drawn = np.searchsorted(shares / shares[-1], rng.random(count), side="right")
    ops: NDArray[np.uint8] = kinds[drawn]
    if Op.CREATE in weights:
        ops[rounds.first] = Op.CREATE
    return ops
