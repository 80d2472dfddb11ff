"""Rows on their way to a topic: columns in, requests out, each with its producer keys inside.

A row's key is (producer, epoch, sequence), and it must lead to the same partition every time it is
sent, for that is where it is recognised. Consecutive sequences share a run; a gap starts another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.model.batch import SCHEMAS, Kind
from penstock.model.columns import RUNS_MAX, Binary, Buffer
from penstock.model.deltas import gather
from penstock.model.partitioning import VECTOR_AT, partitions_of_deltas, partitions_of_digests
from penstock.model.topic import BATCH_ENTRIES_MAX, TopicConfig, TopicKind
from penstock.sinks.protocol import Items

REQUEST_BYTES: Final = 4 << 20  # small enough that several are under way, large enough to be few
_ENQ: Final = SCHEMAS[Kind.ENQ]
Part = tuple[int, int, Buffer]  # partition, entries, ENQ body


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Messages of one producer, in the order of their sequences."""

    sequences: NDArray[np.int64]
    payloads: pa.BinaryArray
    priorities: NDArray[np.int64] | None = None
    keys: pa.BinaryArray | None = None
    headers: pa.BinaryArray | None = None  # msgpack maps; null or empty: none

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, rows: NDArray[np.int64]) -> Rows:
        chosen = pa.array(rows)
        return Rows(
            sequences=self.sequences[rows],
            payloads=self.payloads.take(chosen),
            priorities=None if self.priorities is None else self.priorities[rows],
            keys=None if self.keys is None else self.keys.take(chosen),
            headers=None if self.headers is None else self.headers.take(chosen),
        )

    def slice(self, start: int, end: int) -> Rows:
        count = end - start
        return Rows(
            sequences=self.sequences[start:end],
            payloads=self.payloads.slice(start, count),
            priorities=None if self.priorities is None else self.priorities[start:end],
            keys=None if self.keys is None else self.keys.slice(start, count),
            headers=None if self.headers is None else self.headers.slice(start, count),
        )


def requests(
    rows: Rows, targets: NDArray[np.int64], *, producer: str, epoch: int
) -> Iterator[list[Part]]:
    """The rows as requests; `targets` is the partition of each."""
    gathered: list[Part] = []
    entries = size = 0
    for part in _parts(rows, targets, producer=producer.encode(), epoch=epoch):
        if gathered and (
            size + len(part[2]) > REQUEST_BYTES or entries + part[1] > BATCH_ENTRIES_MAX
        ):
            yield gathered
            gathered, entries, size = [], 0, 0
        gathered.append(part)
        entries += part[1]
        size += len(part[2])
    if gathered:
        yield gathered


def _parts(
    rows: Rows, targets: NDArray[np.int64], *, producer: bytes, epoch: int
) -> Iterator[Part]:
    found = np.unique(targets)
    for target in found.tolist():
        own = rows if len(found) == 1 else rows.take(np.flatnonzero(targets == target))
        for piece in _pieces(own):
            yield target, len(piece), _body(piece, producer=producer, epoch=epoch)


def _pieces(rows: Rows) -> Iterator[Rows]:
    """Cut to what one request may hold."""
    ends = binary(rows.payloads).offsets
    breaks = np.cumsum(np.concatenate(([0], np.diff(rows.sequences) != 1)))
    start = 0
    while start < len(rows):
        end = min(start + BATCH_ENTRIES_MAX, len(rows))
        fits = int(np.searchsorted(ends, ends[start] + REQUEST_BYTES, "right")) - 1
        runs = int(np.searchsorted(breaks, breaks[start] + RUNS_MAX, "left"))
        end = max(start + 1, min(end, fits, runs))
        yield rows.slice(start, end)
        start = end


def _body(rows: Rows, *, producer: bytes, epoch: int) -> bytes:
    starts = np.flatnonzero(np.concatenate(([True], np.diff(rows.sequences) != 1)))
    runs = len(starts)
    columns: dict[str, Any] = {
        "payload": binary(rows.payloads),
        "priority": rows.priorities,
        "key": None if rows.keys is None else binary(rows.keys),
        "headers": None if rows.headers is None else binary(rows.headers),
        "run_count": np.diff(np.append(starts, len(rows))),
        "run_epoch": np.full(runs, epoch, np.uint64),
        "run_sequence": rows.sequences[starts],
        "run_producer": [producer] * runs,
    }
    return _ENQ.encode(len(rows), columns, runs=runs)


def binary(array: pa.Array) -> Binary:
    """An Arrow column as the log lays it out, without a copy of its bytes; null becomes empty."""
    if array.null_count:
        array = pc.fill_null(array, b"")
    _, offsets, blob = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    low, high = int(ends[0]), int(ends[-1])
    data = memoryview(b"") if blob is None else memoryview(blob)[low:high]
    return Binary(ends - np.int32(low), data)


def item_requests(
    items: Items, config: TopicConfig, *, producer: str, epoch: int, partition: int
) -> Iterator[list[Part]]:
    """What a sink appends to a topic, as `TopicWriter` says where it goes, in requests."""
    if config.kind is TopicKind.DELTA:
        targets = delta_targets(items.payloads, config.partitions)
    else:
        targets = np.full(len(items), partition % config.partitions, np.int64)
    rows = Rows(
        sequences=items.sequences,
        payloads=items.payloads,
        priorities=items.priorities,
        headers=items.headers,
    )
    return requests(rows, targets, producer=producer, epoch=epoch)


def delta_targets(payloads: pa.BinaryArray, partitions: int) -> NDArray[np.int64]:
    """The partition of each delta: where the vector's hash that it carries says."""
    column = binary(payloads)
    if partitions == 1 or bool((np.diff(column.offsets) < VECTOR_AT + 8).any()):
        return partitions_of_deltas(column.tolist(), partitions)
    starts = column.offsets[:-1].astype(np.int64) + VECTOR_AT
    return partitions_of_digests(gather(column.blob, starts, np.dtype("<u8")), partitions)
