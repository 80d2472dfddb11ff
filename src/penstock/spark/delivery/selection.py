"""From the change log to one write: the rows of some triggers that a sink is to get.

Sections are mapped from the change files, so that what is not asked for is not read. Rows that no
route of the sink matches are left out; a trigger's rows are judged by that trigger alone, so the
outcome does not depend on how many triggers are taken together.

**Coalescing.** When a sink is behind, a vector that changed in several of the triggers needs only
its newest state: the highest revision. Deltas are history, and all of them are kept, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.sinks.protocol import Feed, Work
from penstock.spark.delivery.backlog import DELTAS, STATES, column_of
from penstock.spark.delivery.routes import Routes, vector_keys
from penstock.spark.fold.change_file import Part
from penstock.spark.fold.changes import ChangeLog


class Span(NamedTuple):
    """Triggers `first` to `last` of one column."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Selected:
    """One write, and what becomes visible by it."""

    work: Work
    log_times_ms: NDArray[np.int64]  # of every row, those overtaken by a newer revision included
    coalesced: int = 0

    @property
    def rows(self) -> int:
        return sum(t.num_rows for t in (self.work.states, self.work.deltas) if t is not None)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What one sink reads of the change log."""

    changes: ChangeLog
    pipeline: str
    routes: Routes
    payloads: bool = False

    def select(self, spans: Mapping[int, Span]) -> Selected:
        """The rows of these columns as one work."""
        first = min(span.first for span in spans.values())
        last = max(span.last for span in spans.values())
        states: list[pa.Table] = []
        deltas: list[pa.Table] = []
        for trigger in range(first, last + 1):
            for part in self.changes.manifest(trigger).parts:
                wanted = {c for c, span in spans.items() if span.first <= trigger <= span.last}
                states += self._states(part, wanted)
                deltas += self._deltas(part, wanted)
        merged = _newest(states) if states else None
        chosen = pa.concat_tables(deltas) if deltas else None
        work = Work(
            pipeline=self.pipeline, first=first, last=last, states=merged, deltas=chosen
        )  # fmt: skip
        taken = sum(table.num_rows for table in states)
        return Selected(
            work=work,
            log_times_ms=_log_times(states or deltas),
            coalesced=taken - (0 if merged is None else merged.num_rows),
        )

    def _states(self, part: Part, wanted: set[int]) -> Iterator[pa.Table]:
        """The part's states, lane by lane."""
        sections = [s for s in part.sections if column_of(s) in wanted and s.kind == "states"]
        if not sections:
            return
        touching = self.deltas_of(part) if self.routes.judge_states_by_deltas else None
        for section in sections:
            table = self.routes.states(self.changes.table(part, section), touching)
            if table.num_rows:
                yield table

    def _deltas(self, part: Part, wanted: set[int]) -> Iterator[pa.Table]:
        """The part's deltas, or its quarantined ones for the sink of those."""
        for section in part.sections:
            if section.kind == "states" or column_of(section) not in wanted:
                continue
            table = self.changes.table(part, section)
            if section.kind == "deltas":
                table = self.routes.deltas(table)
                if not self.payloads:
                    table = _without_payload(table)
            if table.num_rows:
                yield table

    def deltas_of(self, part: Part) -> pa.Table | None:
        """All deltas of a part, whatever the sink is fed."""
        found = [s for s in part.sections if s.kind == "deltas"]
        return self.changes.table(part, found[0]) if found else None


def columns_of(feed: Feed) -> tuple[int, ...]:
    """The columns of the backlog that a sink with this feed watches."""
    states = STATES if feed & Feed.STATES else ()
    deltas = (DELTAS,) if feed & (Feed.DELTAS | Feed.PAYLOADS) else ()
    return (*states, *deltas)


def _newest(tables: list[pa.Table]) -> pa.Table:
    """One row per vector: that of the highest revision, in the order of their appearance."""
    table = pa.concat_tables(tables)
    if len(tables) == 1 or not table.num_rows:
        return table
    codes = np.asarray(vector_keys(table).dictionary_encode().indices)
    order = np.lexsort((table["revision"].to_numpy(), codes))
    ends = np.append(codes[order][1:] != codes[order][:-1], True)
    keep = np.sort(order[ends])
    return table if len(keep) == len(order) else table.take(pa.array(keep))


def _without_payload(table: pa.Table) -> pa.Table:
    at = table.schema.get_field_index("payload")
    if at < 0 or table["payload"].null_count == table.num_rows:
        return table
    return table.set_column(at, table.schema.field(at), pa.nulls(table.num_rows, pa.binary()))


def _log_times(tables: list[pa.Table]) -> NDArray[np.int64]:
    if not tables:
        return np.zeros(0, np.int64)
    return np.concatenate([table["log_time_ms"].to_numpy() for table in tables])
