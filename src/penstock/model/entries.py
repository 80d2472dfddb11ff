"""An entry on its way into a log: what it may hold at most, and the ENQ body that carries it.

Whoever takes entries from a caller, the client, the gateway, a sink or the node, holds them against
these limits and lays them out by `ENQ`. A producer numbers its entries without a gap, so that a
body says of a whole stretch of them once whose they are: a `EntryRun`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.model.batch import SCHEMAS, Kind
from penstock.model.columns import Value

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
