"""The columns in which messages travel: leased, peeked and dead ones, and released deltas."""

from __future__ import annotations

from typing import Final

from penstock.model.columns import Column, Schema

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
