"""Writers that make deltas, and a fold of them in plain Python to compare with."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.model.columns import Binary
from penstock.model.delta import Delta, Op, PriorityClass, encode, hybrid_time, vector_hash
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.merge import VectorStates
from penstock.propagation.fold.propagator import FeedOutcome, Propagator
from penstock.propagation.options import PropagationOptions

DIMENSIONS = 6
START_MS = 1_800_000_000_000
OPS = list(Op)


@dataclass
class World:
    """Several origins change a few vectors; each sees what it is shown of the others."""

    deltas: list[Delta] = field(default_factory=list)
    # by (origin, vector): what this origin has seen of it
    seen: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    heads: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def write(self, origin: str, vector: str, op: Op, *, tick: int, **content: Any) -> Delta:
        clock = self.seen.setdefault((origin, vector), {})
        clock[origin] = clock.get(origin, 0) + 1
        delta = Delta(
            delta_id=(len(self.deltas) + 1).to_bytes(8, "big") * 2,
            namespace="n",
            vector_id=vector,
            op=op,
            origin=origin,
            time=hybrid_time(START_MS + tick),
            parent=self.heads.get((origin, vector)),
            clock=dict(clock),
            **content,
        )
        self.heads[origin, vector] = delta.delta_id
        self.deltas.append(delta)
        return delta

    def show(self, origin: str, to: str, vector: str) -> None:
        """`to` learns all that `origin` knows of a vector."""
        known = self.seen.get((origin, vector))
        if known and origin != to:
            mine = self.seen.setdefault((to, vector), {})
            for other, count in known.items():
                mine[other] = max(mine.get(other, 0), count)
            self.heads[to, vector] = self.heads[origin, vector]


NUMBERS = (0.0, 1.0, -1.5, 0.1, 3e38, -7.25, 1e-30)


class Luck(random.Random):
    """Everything below is a function of a seed: hypothesis draws seeds and sizes, not numbers."""

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random() < chance

    def floats(self, count: int) -> np.ndarray:
        return np.array(self.choices(NUMBERS, k=count), np.float32)

    def content(self, op: Op) -> dict[str, Any]:
        if op in (Op.CREATE, Op.DENSE):
            found: dict[str, Any] = {"values": self.floats(DIMENSIONS)}
            return found | ({"metadata": {"m": self.randrange(9)}} if self.maybe() else {})
        if op == Op.SCALE:
            return {"values": self.floats(1)}
        if op == Op.SPARSE or (op == Op.OFFSET and self.maybe()):
            named = sorted(self.sample(range(DIMENSIONS), self.randint(1, 3)))
            return {"indices": np.array(named, np.uint16), "values": self.floats(len(named))}
        if op == Op.OFFSET:
            return {"values": self.floats(DIMENSIONS)}
        return {"metadata": {"m": self.randrange(9)}} if op == Op.METADATA else {}

    def history(self, size: int) -> list[Delta]:
        """Deltas as written: equal times, clocks that step back, concurrent changes."""
        world = World()
        for tick in range(size):
            origin, vector = self.choice("abc"), self.choice("vw")
            if self.maybe():
                world.show(self.choice("abc"), origin, vector)
            op = self.choice(OPS)
            when = self.choice((tick, tick, self.randrange(9)))
            more = self.content(op)
            world.write(
                origin, vector, op, tick=when, priority=self.choice(list(PriorityClass)), **more
            )
        return world.deltas

    def arrivals(self, deltas: list[Delta]) -> list[Delta]:
        """Some of them twice; in any order, or nearly in order."""
        again = self.choices(deltas, k=self.randrange(6))
        reach = self.choice((0.5, 3, len(deltas) + 9))
        places = [i + self.uniform(0, reach) for i in range(len(deltas))]
        places += [deltas.index(delta) + self.uniform(0, reach + 2) for delta in again]
        both = [*deltas, *again]
        return [both[i] for i in sorted(range(len(both)), key=places.__getitem__)]

    def cuts(self, count: int) -> list[int]:
        inner = self.sample(range(1, count), min(count - 1, self.randrange(7))) if count > 1 else []
        return [0, *sorted(inner), count]


lucks = st.integers(0, 1 << 32).map(Luck)
sizes = st.integers(1, 40)


def batch_of(
    deltas: list[Delta], first: int = 1, *, times_ms: list[int] | None = None, headers: bool = False
) -> DeltaBatch:
    payloads = [encode(delta, dimensions=DIMENSIONS) for delta in deltas]
    names = Binary.of([b"h%d" % (first + i) for i in range(len(deltas))]) if headers else None
    return DeltaBatch.of(
        payloads,
        sequences=np.arange(first, first + len(deltas), dtype=np.uint64),
        log_times_ms=np.array(times_ms or [START_MS] * len(deltas), np.int64),
        headers=names,
    )


def run(
    fold: Propagator,
    log: DeltaBatch,
    ends: list[int],
    *,
    found: set[bytes] | None = None,
    touched: list[VectorStates] | None = None,
) -> list[FeedOutcome]:
    """Feed a log in pieces; what is missing is answered from `found`. What each piece changed is
    added to `touched`."""
    outcomes = []
    for a, b in pairwise(ends):
        piece = log.take(np.arange(a, b))
        through = int(piece.sequences[-1]) if b > a else 0
        outcomes.append(fold.feed(piece, through=through, states=touched is not None))
        while missing := fold.missing():
            outcomes.append(fold.resolve((found or set()) & set(missing)))
        if touched is not None:
            touched.append(fold.take_touched())
        fold.validate()
    return outcomes


def story(outcomes: list[FeedOutcome]) -> dict[str, list[Any]]:
    """All that may not depend on how the log was cut."""
    return {
        "ids": [id_ for o in outcomes for id_ in o.released.delta_ids()],
        "payloads": [p for o in outcomes for p in o.released.payloads],
        "positions": [p for o in outcomes for p in o.positions.tolist()],
        "ordinals": [n for o in outcomes for n in o.ordinals.tolist()],
        "log_times": [t for o in outcomes for t in o.released.log_times_ms.tolist()],
        "headers": [h for o in outcomes for h in (o.released.headers or [b""] * len(o.released))],
        "quarantined": [id_ for o in outcomes for id_ in o.quarantined.delta_ids()],
        "reasons": [r for o in outcomes for r in o.reasons],
        "missing": [m for o in outcomes for m in o.missing],
        "duplicates": [sum(o.counts["duplicates"] for o in outcomes)],
    }


def plain(states: VectorStates, *, log: bool = True) -> dict[str, tuple[Any, ...]]:
    """States by vector; without what depends on the order of arrival if `log` is False."""
    found = {}
    for i in range(len(states)):
        row: tuple[Any, ...] = (
            states.values[i].tobytes(), states.metadata[i], bool(states.deleted[i]),
            int(states.revision[i]), int(states.time[i]),
        )  # fmt: skip
        if log:
            row += (int(states.sequence[i]), int(states.log_time_ms[i]))
        found[states.vector_id[i].decode()] = row
    return found


def reference(deltas: list[Delta]) -> dict[str, tuple[bytes, Any, bool, int, int]]:
    """Every delta once, in the order of stamps, one component at a time."""
    distinct = {delta.delta_id: delta for delta in deltas}.values()
    found = {}
    for vector in {delta.vector_id for delta in distinct}:
        own = sorted(
            (d for d in distinct if d.vector_id == vector), key=lambda d: d.clock[d.origin]
        )
        last: dict[str, int] = {}
        stamped = []
        for delta in own:
            last[delta.origin] = max(delta.time, last.get(delta.origin, 0) + 1)
            stamped.append((last[delta.origin], delta.origin.encode(), delta))
        found[vector] = _folded(sorted(stamped, key=lambda row: row[:2]))
    return found


def _folded(stamped: list[tuple[int, bytes, Delta]]) -> tuple[bytes, Any, bool, int, int]:
    values = [np.float32(0)] * DIMENSIONS
    metadata, deleted = None, False
    for _, _, delta in stamped:
        named = range(DIMENSIONS) if delta.indices is None else delta.indices.tolist()
        given = delta.values if delta.values is not None else []
        if delta.op in (Op.CREATE, Op.DENSE, Op.SPARSE):
            for index, value in zip(named, given, strict=True):
                values[index] = value
        elif delta.op == Op.OFFSET:
            for index, value in zip(named, given, strict=True):
                values[index] = _held(float(values[index]) + float(value))
        elif delta.op == Op.SCALE:
            values = [_held(float(value) * float(given[0])) for value in values]
        if delta.op in (Op.CREATE, Op.DENSE, Op.DELETE):
            deleted = delta.op == Op.DELETE
        if delta.metadata is not None or delta.op in (Op.CREATE, Op.DELETE):
            metadata = delta.metadata
    out = np.zeros(DIMENSIONS, np.float32) if deleted else np.array(values, np.float32)
    return (
        out.tobytes(), None if deleted else metadata, deleted, len(stamped),
        max(stamp for stamp, _, _ in stamped),
    )  # fmt: skip


def _held(value: float) -> np.float32:
    """A double rounded to float32 once (sums and products of two are exact enough), and finite."""
    top = float(np.finfo(np.float32).max)
    return np.float32(min(max(value, -top), top))


def options(**changes: int) -> PropagationOptions:
    return PropagationOptions(**changes)


def hash_pair(vector: str) -> np.ndarray:
    return np.frombuffer(vector_hash("n", vector), "<u8")
