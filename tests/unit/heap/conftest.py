"""A heap with the log that feeds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.heap.machine import Heap
from penstock.heap.state import Applied
from penstock.model.batch import SCHEMAS, Batch, Codec, Kind
from penstock.model.columns import Columns
from penstock.model.topic import topic_config

NOW = 1_000_000


class HeapLog:
    """Writes records and applies them; `now` is the time of the next one."""

    def __init__(self, **changes: Any) -> None:
        self.config = topic_config({"name": "t", "id": 1, **changes})
        self.heap = Heap(self.config, partition=0)
        self.now = NOW
        self.batches: list[Batch] = []

    def batch(
        self, kind: Kind, count: int, values: dict[str, Any], *, runs: int = 0, covers: int = 0
    ) -> Batch:
        body = SCHEMAS[kind].encode(count, values, runs=runs)
        last = self.heap.sequence_applied + (covers or count)
        return Batch(
            kind, Codec.NONE, bool(covers), 1, 0, 1, 1, self.heap.sequence_applied + 1, last,
            count, self.now, len(body), 0, b"", body,
        )  # fmt: skip

    def write(self, kind: Kind, count: int, values: dict[str, Any], **more: int) -> Applied:
        batch = self.batch(kind, count, values, **more)
        self.batches.append(batch)
        return self.heap.apply(batch, batch.columns())

    def put(self, *priorities: int, runs: int = 0, **columns: Any) -> list[int]:
        """Enqueue; the messages' sequences."""
        first = self.heap.sequence_applied + 1
        values = {"priority": list(priorities), **columns}
        self.write(Kind.ENQ, len(priorities), values, runs=runs)
        return list(range(first, first + len(priorities)))

    def lease(self, n: int, *, consumer: bytes = b"c", visibility_ms: int = 30_000) -> list[int]:
        """Lease the best; the tokens."""
        messages = self.heap.select(n, self.now)
        first = self.heap.sequence_applied + 1
        values = {
            "message": messages, "run_count": [len(messages)],
            "run_visibility_ms": [visibility_ms], "run_consumer": [consumer],
        }  # fmt: skip
        self.write(Kind.LEASE, len(messages), values, runs=1)
        return list(range(first, first + len(messages)))

    def ack(self, *tokens: int) -> Applied:
        return self.write(Kind.ACK, len(tokens), {"token": list(tokens)})

    def nack(self, *tokens: int, not_before_ms: int = 0) -> Applied:
        values = {"token": list(tokens), "not_before_ms": [not_before_ms] * len(tokens)}
        return self.write(Kind.NACK, len(tokens), values)

    def die(self, *tokens: int, detail: bytes = b"") -> Applied:
        n = len(tokens)
        values = {"token": list(tokens), "reason": [1] * n, "detail": [detail] * n}
        return self.write(Kind.DEAD, n, values)

    def select(self, n: int = 1000) -> list[int]:
        found: list[int] = self.heap.select(n, self.now).tolist()
        return found

    def body(self, *runs: tuple[bytes, int, int, int]) -> Columns:
        """An ENQ body of runs (producer, epoch, first sequence, count)."""
        values = self.runs(*runs)
        count = sum(run[3] for run in runs)
        return SCHEMAS[Kind.ENQ].decode(
            SCHEMAS[Kind.ENQ].encode(count, values, runs=len(runs)), count
        )

    @staticmethod
    def runs(*runs: tuple[bytes, int, int, int]) -> dict[str, Any]:
        return {
            "priority": [0] * sum(run[3] for run in runs),
            "run_producer": [run[0] for run in runs],
            "run_epoch": [run[1] for run in runs],
            "run_sequence": [run[2] for run in runs],
            "run_count": [run[3] for run in runs],
        }

    def put_runs(self, *runs: tuple[bytes, int, int, int]) -> int:
        """Enqueue such runs; the first message's sequence."""
        first = self.heap.sequence_applied + 1
        self.write(Kind.ENQ, sum(r[3] for r in runs), self.runs(*runs), runs=len(runs))
        return first


@pytest.fixture
def log() -> HeapLog:
    return HeapLog()


@pytest.fixture
def log_of() -> Callable[..., HeapLog]:
    return HeapLog


@pytest.fixture
def u64() -> Callable[..., NDArray[np.uint64]]:
    return lambda *values: np.array(values, np.uint64)
