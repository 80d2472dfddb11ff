"""What a fold returns, as the sections of a change file.

STATES, a section per lane and a row per vector: one that was touched more than once stands there
once, as it is at the end, in the most urgent lane of all that touched it. DELTAS in the order of
release. QUARANTINE has the columns of DELTAS, with the payload, and why each is there; its ordinal
counts the quarantined deltas of the partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.model.delta_format import NO_ID
from penstock.propagation.partition import Outcome
from penstock.sinks.protocol import Feed
from penstock.sinks.schema import DELTAS, deltas_table, states_table
from penstock.spark.fold.change_file import LANES, ChangeWriter

QUARANTINE: Final = pa.schema(
    [
        *DELTAS,
        pa.field("reason", pa.utf8(), nullable=False),
        pa.field("missing", pa.binary(16)),  # the parent that never came
    ]
)
LAST: Final = frozenset({"pending", "pending_oldest_ms"})  # counts that say how it is, not how much


def write_outcomes(
    writer: ChangeWriter,
    outcomes: Sequence[Outcome],
    *,
    topic: str,
    partition: int,
    feed: Feed,
    quarantined: int,
) -> None:
    """Add what `feed` names, and the quarantine; `quarantined` of the partition came before."""
    place: dict[str, Any] = {"topic": topic, "partition": partition}
    if Feed.STATES in feed:
        _write_states(writer, [states_table(outcome.touched, **place) for outcome in outcomes])
    if Feed.DELTAS in feed:
        payloads = Feed.PAYLOADS in feed
        tables = [deltas_table(outcome, **place, payloads=payloads) for outcome in outcomes]
        writer.add("deltas", pa.concat_tables(tables))
    for outcome in outcomes:
        quarantined += len(outcome.quarantined)
    writer.add("quarantine", _quarantine(outcomes, last=quarantined, **place))


def _write_states(writer: ChangeWriter, tables: Sequence[pa.Table]) -> None:
    states = _newest(tables)
    lanes = states["lane"].to_numpy()
    for lane in range(LANES):
        rows = np.flatnonzero(lanes == lane)
        whole = len(rows) == len(lanes)
        writer.add("states", states if whole else states.take(pa.array(rows)), lane=lane)


def total(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """The counts of all outcomes together."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        for name, value in outcome.counts.items():
            counts[name] = value if name in LAST else counts.get(name, 0) + value
    return counts


def _quarantine(outcomes: Sequence[Outcome], *, last: int, topic: str, partition: int) -> pa.Table:
    tables = []
    ordinal = last - sum(len(outcome.quarantined) for outcome in outcomes)
    for outcome in outcomes:
        batch = outcome.quarantined
        count = len(batch)
        numbered = SimpleNamespace(
            released=batch,
            positions=batch.sequences,
            ordinals=np.arange(ordinal + 1, ordinal + count + 1, dtype=np.uint64),
        )
        ordinal += count
        table = deltas_table(numbered, topic=topic, partition=partition, payloads=True)
        reasons = pa.array(outcome.reasons, pa.utf8())
        missing = [None if id_ == NO_ID else id_ for id_ in outcome.missing]
        tables.append(
            pa.table([*table.columns, reasons, pa.array(missing, pa.binary(16))], schema=QUARANTINE)
        )
    return pa.concat_tables(tables)


def _newest(tables: Sequence[pa.Table]) -> pa.Table:
    """One row per vector: the last one, in the most urgent lane."""
    full = [table for table in tables if table.num_rows]
    if len(full) <= 1:
        return full[0] if full else tables[0]
    table = pa.concat_tables(full)
    last: dict[tuple[str, str], int] = {}
    lanes: NDArray[np.int8] = table["lane"].to_numpy().copy()
    names = zip(table["namespace"].to_pylist(), table["vector_id"].to_pylist(), strict=True)
    for row, name in enumerate(names):
        before = last.pop(name, None)
        if before is not None:
            lanes[row] = min(lanes[row], lanes[before])
        last[name] = row
    at = table.schema.get_field_index("lane")
    table = table.set_column(at, table.schema.field(at), pa.array(lanes, pa.int8()))
    return table.take(pa.array(sorted(last.values()), pa.int64()))
