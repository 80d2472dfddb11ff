"""Messages on their way to a topic: columns in, requests out, each with its producer keys inside.

A message's key is (producer, epoch, sequence), and it must lead to the same partition every time it
is sent, for that is where it is recognised. Consecutive sequences share a run; a gap starts
another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.model.columns import RUNS_MAX, Binary, Buffer
from penstock.model.delta_batch import gather
from penstock.model.entries import BATCH_ENTRIES_MAX, ENQ
from penstock.model.partitioning import VECTOR_AT, partitions_of_deltas, partitions_of_digests
from penstock.model.topic import TopicConfig, TopicKind
from penstock.sinks.protocol import Items

REQUEST_BYTES: Final = 4 << 20  # small enough that several are under way, large enough to be few
Part = tuple[int, int, Buffer]  # partition, entries, ENQ body


def requests(
    items: Items, targets: NDArray[np.int64], *, producer: str, epoch: int
) -> Iterator[list[Part]]:
    gathered: list[Part] = []
    entries = size = 0
    for part in _parts(items, targets, producer=producer.encode(), epoch=epoch):
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
    items: Items, targets: NDArray[np.int64], *, producer: bytes, epoch: int
) -> Iterator[Part]:
    found = np.unique(targets)
    for target in found.tolist():
        own = items if len(found) == 1 else items.take(np.flatnonzero(targets == target))
        for piece in _pieces(own):
            yield target, len(piece), _body(piece, producer=producer, epoch=epoch)


def _pieces(items: Items) -> Iterator[Items]:
    ends = binary(items.payloads).offsets
    breaks = np.cumsum(np.concatenate(([0], np.diff(items.sequences) != 1)))
    start = 0
    while start < len(items):
        end = min(start + BATCH_ENTRIES_MAX, len(items))
        fits = int(np.searchsorted(ends, ends[start] + REQUEST_BYTES, "right")) - 1
        runs = int(np.searchsorted(breaks, breaks[start] + RUNS_MAX, "left"))
        end = max(start + 1, min(end, fits, runs))
        yield items.slice(start, end)
        start = end


def _body(items: Items, *, producer: bytes, epoch: int) -> bytes:
    starts = np.flatnonzero(np.concatenate(([True], np.diff(items.sequences) != 1)))
    runs = len(starts)
    columns: dict[str, Any] = {
        "payload": binary(items.payloads),
        "priority": items.priorities,
        "key": None if items.keys is None else binary(items.keys),
        "headers": None if items.headers is None else binary(items.headers),
        "run_count": np.diff(np.append(starts, len(items))),
        "run_epoch": np.full(runs, epoch, np.uint64),
        "run_sequence": items.sequences[starts],
        "run_producer": [producer] * runs,
    }
    return ENQ.encode(len(items), columns, runs=runs)


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
    return requests(items, targets, producer=producer, epoch=epoch)


def delta_targets(payloads: pa.BinaryArray, partitions: int) -> NDArray[np.int64]:
    """The partition of each delta: where the vector's hash that it carries says."""
    column = binary(payloads)
    if partitions == 1 or bool((np.diff(column.offsets) < VECTOR_AT + 8).any()):
        return partitions_of_deltas(column.tolist(), partitions)
    starts = column.offsets[:-1].astype(np.int64) + VECTOR_AT
    return partitions_of_digests(gather(column.blob, starts, np.dtype("<u8")), partitions)
