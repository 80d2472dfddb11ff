"""The columns in which messages travel: leased, peeked and dead ones, and released deltas."""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.model.columns import Buffer, Column, Schema

DELIVERY: Final = Schema(
    1,
    (
        Column("message", "uint64"),  # the message's sequence in its partition
        Column("time_ms", "int64"),  # when it was enqueued
        Column("priority", "int64"),
        Column("attempts", "uint32"),  # deliveries before this one that ended unfinished
        Column("key", "binary"),
        Column("headers", "binary"),
        Column("payload", "binary"),
    ),
)

CHANGES: Final = Schema(
    1,
    (
        Column("position", "uint64"),  # the sequence of the entry whose arrival released the delta
        Column("ordinal", "uint64"),  # 1, 2, 3 … over what the partition has released
        Column("sequence", "uint64"),  # the delta's own, in its partition
        Column("time_ms", "int64"),  # when it was put
        Column("headers", "binary"),
        Column("payload", "binary"),  # the delta
    ),
)

_PRIORITY_AT: Final = 2  # the byte of a delta that has its class
_FEW: Final = 32  # rows that are looked at one by one sooner than as an array


def most_urgent(body: Buffer, count: int) -> int | None:
    """The most urgent class among CHANGES; None if there are none."""
    if not count:
        return None
    columns = CHANGES.decode(body, count)
    starts, blob = columns.views["payload"], columns.blobs["payload"]
    if count == 1:
        return blob[_PRIORITY_AT]
    if count <= _FEW:
        return min([blob[start + _PRIORITY_AT] for start in starts.tolist()[:-1]])
    offsets = np.frombuffer(starts, np.int32)[:-1]
    return int(np.frombuffer(blob, np.uint8)[offsets + _PRIORITY_AT].min())
