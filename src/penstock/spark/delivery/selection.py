"""From the change log to one write: the rows of some triggers that a sink is to get.

Sections are mapped from the change files, so that what is not asked for is not read. Rows that no
route of the sink matches are left out; a trigger's rows are judged by that trigger alone, so the
outcome does not depend on how many triggers are taken together.

**Routes** are those of `penstock.propagation.flow.route`, on Arrow. Deltas are judged one by one. A
*state* has a namespace and a vector, but neither an operation nor headers: a route by one of those
takes the vectors that a matching delta touched in this trigger, each with its whole state, whatever
else has touched it. A row that several routes take comes once.

**Coalescing.** When a sink is behind, a vector that changed in several of the triggers needs only
its newest state: the highest revision. Deltas are history, and all of them are kept, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.model.delta import Op
from penstock.propagation.flow.route import DeltaRoute, RouteKind
from penstock.sinks.protocol import Feed, Work
from penstock.sinks.schema import newest_of, vector_keys
from penstock.spark.delivery.backlog import DELTAS, STATES, TriggerSpan, column_of
from penstock.spark.fold.changes import ChangeLog, ChangePart

_BY_DELTAS: Final = frozenset({RouteKind.OP, RouteKind.HEADER})


@dataclass(frozen=True, kw_only=True)
class SinkRoutes:
    """A sink's routes; none: everything."""

    routes: tuple[DeltaRoute, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        return cls(routes=tuple(DeltaRoute.parse(text) for text in texts))

    @property
    def all(self) -> bool:
        return not self.routes or any(route.kind is RouteKind.ALL for route in self.routes)

    @property
    def judge_states_by_deltas(self) -> bool:
        return not self.all and any(route.kind in _BY_DELTAS for route in self.routes)

    def deltas(self, deltas: pa.Table) -> pa.Table:
        if self.all:
            return deltas
        return deltas.filter(_any(_delta_mask(route, deltas) for route in self.routes))

    def states(self, states: pa.Table, touching: pa.Table | None) -> pa.Table:
        """The states that some route takes; `touching` are all deltas of their trigger."""
        if self.all:
            return states
        masks = [_name_mask(r, states) for r in self.routes if r.kind not in _BY_DELTAS]
        judged = [r for r in self.routes if r.kind in _BY_DELTAS]
        if judged and touching is not None:
            taken = touching.filter(_any(_delta_mask(route, touching) for route in judged))
            keys, wanted = (vector_keys(table, topics=True) for table in (states, taken))
            masks.append(pc.is_in(keys, value_set=wanted))
        return states.filter(_any(masks)) if masks else states.slice(0, 0)


def _any(masks: Iterable[Any]) -> Any:
    return reduce(pc.or_, masks)


def _delta_mask(route: DeltaRoute, deltas: pa.Table) -> Any:
    if route.kind is RouteKind.OP:
        return pc.equal(deltas["op"], pa.scalar(int(Op[route.value]), pa.int8()))
    if route.kind is RouteKind.HEADER:
        found = [_header(data, route.name) == route.value for data in deltas["headers"].to_pylist()]
        return pa.chunked_array([pa.array(found, pa.bool_())])
    return _name_mask(route, deltas)


def _name_mask(route: DeltaRoute, table: pa.Table) -> Any:
    if route.kind is RouteKind.NAMESPACE:
        return pc.equal(table["namespace"], route.value)
    assert route.kind is RouteKind.VECTOR, route
    same = pc.equal(table["namespace"], route.name)
    return pc.and_(same, pc.equal(table["vector_id"], route.value))


def _header(data: bytes | None, name: str) -> Any:
    """A header of a message; what is no map has none."""
    try:
        found = msgspec.msgpack.decode(data) if data else {}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return found.get(name) if isinstance(found, dict) else None


@dataclass(frozen=True, kw_only=True)
class Selected:
    """One write, and what becomes visible by it."""

    work: Work
    rows: int
    log_times_ms: NDArray[np.int64]  # of every row, those overtaken by a newer revision included
    coalesced: int  # how many were


@dataclass(frozen=True, kw_only=True)
class ChangeSelection:
    changes: ChangeLog
    pipeline: str
    routes: SinkRoutes
    payloads: bool = False

    def select(self, spans: Mapping[int, TriggerSpan]) -> Selected:
        first = min(span.first for span in spans.values())
        last = max(span.last for span in spans.values())
        states: list[pa.Table] = []
        deltas: list[pa.Table] = []
        for trigger in range(first, last + 1):
            for part in self.changes.manifest(trigger).parts:
                wanted = {c for c, span in spans.items() if span.first <= trigger <= span.last}
                states += self._states(part, wanted)
                deltas += self._deltas(part, wanted)
        times = [table["log_time_ms"].to_numpy() for table in states or deltas]
        merged = pa.concat_tables(states) if states else None
        if merged is not None and first < last:  # within a trigger a vector comes once
            merged = newest_of(merged, topics=True)
        chosen = pa.concat_tables(deltas) if deltas else None
        work = Work(pipeline=self.pipeline, first=first, last=last, states=merged, deltas=chosen)
        held = 0 if merged is None else merged.num_rows
        return Selected(
            work=work,
            rows=held + sum(table.num_rows for table in deltas),
            log_times_ms=np.concatenate([np.zeros(0, np.int64), *times]),
            coalesced=sum(table.num_rows for table in states) - held,
        )

    def _states(self, part: ChangePart, wanted: set[int]) -> Iterator[pa.Table]:
        sections = [s for s in part.sections if column_of(s) in wanted and s.kind == "states"]
        if not sections:
            return
        touching = self._deltas_of(part) if self.routes.judge_states_by_deltas else None
        for section in sections:
            table = self.routes.states(self.changes.table(part, section), touching)
            if table.num_rows:
                yield table

    def _deltas(self, part: ChangePart, wanted: set[int]) -> Iterator[pa.Table]:
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

    def all_deltas(self, triggers: Iterable[int]) -> Iterator[pa.Table]:
        """All deltas of some triggers, whatever the sink is fed."""
        for trigger in triggers:
            for part in self.changes.manifest(trigger).parts:
                deltas = self._deltas_of(part)
                if deltas is not None:
                    yield deltas

    def _deltas_of(self, part: ChangePart) -> pa.Table | None:
        found = [s for s in part.sections if s.kind == "deltas"]
        return self.changes.table(part, found[0]) if found else None


def columns_of(feed: Feed) -> tuple[int, ...]:
    """The columns of the backlog that a sink with this feed watches."""
    states = STATES if feed & Feed.STATES else ()
    deltas = (DELTAS,) if feed & (Feed.DELTAS | Feed.PAYLOADS) else ()
    return (*states, *deltas)


def _without_payload(table: pa.Table) -> pa.Table:
    at = table.schema.get_field_index("payload")
    if at < 0 or table["payload"].null_count == table.num_rows:
        return table
    return table.set_column(at, table.schema.field(at), pa.nulls(table.num_rows, pa.binary()))
