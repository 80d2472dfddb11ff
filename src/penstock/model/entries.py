"""An entry on its way into a log, and out of it: its limits, and the columns that carry it.

Whoever takes entries from a caller, the client, the gateway, a sink or the node, holds them against
these limits and lays them out by `ENQ`. A producer numbers its entries without a gap, so that a
body says of a whole stretch of them once whose they are: a `EntryRun`.

`DELIVERY` are the columns in which messages are handed out, leased, peeked or dead ones, and
`CHANGES` those of released deltas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from penstock.model.batch import SCHEMAS, Kind
from penstock.model.columns import Buffer, Column, Schema, Value

BATCH_ENTRIES_MAX: Final = 10_000
KEY_BYTES_MAX: Final = 1024
HEADERS_BYTES_MAX: Final = 16 << 10
PRODUCER_ID_BYTES_MAX: Final = 128
PRODUCER_NUMBER_MAX: Final = (1 << 63) - 1  # of a producer's epoch, and of its sequences
DELAY_MS_MAX: Final = 366 * 24 * 3600 * 1000
RETRIES_MAX: Final = 1000

ENQ: Final = SCHEMAS[Kind.ENQ]


class EntryRun(NamedTuple):
    """Entries that one producer numbered `sequence`, `sequence + 1`, …"""

    entries: int
    epoch: int
    sequence: int
    producer: bytes


def run_columns(runs: Sequence[EntryRun]) -> dict[str, Value]:
    """The columns of an ENQ body that say who produced its entries; none for no runs."""
    if not runs:
        return {}
    entries, epochs, sequences, producers = zip(*runs, strict=True)
    return {
        "run_count": entries,
        "run_epoch": epochs,
        "run_sequence": sequences,
        "run_producer": producers,
    }


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
