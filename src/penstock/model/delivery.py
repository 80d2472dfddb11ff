"""The columns in which leased, peeked and dead messages travel to a reader."""

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
