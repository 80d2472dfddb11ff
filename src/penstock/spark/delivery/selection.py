"""Which rows of the change log a sink gets: chosen where they are read, in a task or in the driver.

**Selection.** Sections are mapped from the change files, so that what is not asked for is not read.
Rows that no route of the sink matches are left out; a trigger's rows are judged by that trigger
alone, so the outcome does not depend on how many triggers are taken together.

**Routes** are those of `penstock.propagation.flow.route`, on Arrow. Deltas are judged one by one. A
*state* has a namespace and a vector, but neither an operation nor headers: a route by one of those
takes the vectors that a matching delta touched in this trigger, each with its whole state, whatever
else has touched it. A row that several routes take comes once.

**Coalescing.** When a sink is behind, a vector that changed in several of the triggers needs only
its newest state: the highest revision. Deltas are history, and all of them are kept, in order. Both
need the rows of a log partition together, and of no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.model.delta import Op
from penstock.propagation.flow.route import DeltaRoute, RouteKind
from penstock.sinks.protocol import Feed, Work, shards_of
from penstock.sinks.schema import dimensions_of, newest_of, vector_keys
from penstock.spark.delivery.backlog import DELTAS, STATES, WritePlan, column_of
from penstock.spark.fold.state import ChangeLog, ChangePart, Section, read_section
from penstock.spark.store import Store

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

    def cover(self, other: SinkRoutes) -> bool:
        """Whether all that `other` takes is taken by these, too."""
        return self.all or (not other.all and set(other.routes) <= set(self.routes))

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
        found = [_header(text, route.name) == route.value for text in deltas["headers"].to_pylist()]
        return pa.chunked_array([pa.array(found, pa.bool_())])
    return _name_mask(route, deltas)


def _name_mask(route: DeltaRoute, table: pa.Table) -> Any:
    if route.kind is RouteKind.NAMESPACE:
        return pc.equal(table["namespace"], route.value)
    assert route.kind is RouteKind.VECTOR, route
    same = pc.equal(table["namespace"], route.name)
    return pc.and_(same, pc.equal(table["vector_id"], route.value))


def _header(text: str | None, name: str) -> Any:
    """A header of a message, as JSON says it."""
    return None if text is None else msgspec.json.decode(text).get(name)


class TakenPart(NamedTuple):
    """A partition's part of a trigger, and the columns of the backlog that are wanted of it."""

    part: ChangePart
    columns: frozenset[int]

    @property
    def wanted(self) -> list[Section]:
        return [s for s in self.part.sections if column_of(s) in self.columns]


class Portion(NamedTuple):
    """What one write takes, under the numbers of these triggers."""

    first: int
    last: int
    taken: tuple[TakenPart, ...]


def portion_of(changes: ChangeLog, plan: WritePlan) -> Portion:
    """What a plan takes, trigger by trigger, without the parts that have nothing of it."""
    found: list[TakenPart] = []
    for trigger in range(plan.first, plan.last + 1):
        wanted = frozenset(c for c, s in plan.spans.items() if s.first <= trigger <= s.last)
        parts = [TakenPart(part, wanted) for part in changes.manifest(trigger).parts]
        found += [one for one in parts if one.wanted]
    return Portion(plan.first, plan.last, tuple(found))


class Shard(NamedTuple):
    number: int
    of: int


@dataclass(frozen=True, kw_only=True)
class SelectedChanges:
    works: list[Work]
    rows: int
    coalesced: int  # rows overtaken by a newer revision
    log_times_ms: NDArray[np.int64]  # of every row, the overtaken ones included


@dataclass(frozen=True, kw_only=True)
class ChangeSelection:
    store: Store
    pipeline: str
    routes: SinkRoutes
    payloads: bool = False

    def select(
        self,
        portion: Portion,
        *,
        rows_max: int | None = None,
        shard: Shard | None = None,
    ) -> SelectedChanges:
        """The rows of the parts, as works of their triggers: one of them, unless vectors have
        several dimensions or `rows_max` cuts the states into pieces."""
        first, last, taken = portion
        states = [table for one in taken for table in self._states(one, shard)]
        deltas = [table for one in taken for table in self._deltas(one)]
        pieces = (_merged(group, several=first < last) for group in _by_dimensions(states))
        merged = [one for table in pieces for one in _cut(table, rows_max)]
        chosen = pa.concat_tables(deltas) if deltas else None
        times = [table["log_time_ms"].to_numpy() for table in states or deltas]
        work = Work(pipeline=self.pipeline, first=first, last=last)
        works = [replace(work, states=table) for table in merged]
        if chosen is not None:
            works = [replace(works[0] if works else work, deltas=chosen), *works[1:]]
        kept = sum(table.num_rows for table in merged)
        return SelectedChanges(
            works=works,
            rows=kept + (0 if chosen is None else chosen.num_rows),
            coalesced=sum(table.num_rows for table in states) - kept,
            log_times_ms=np.concatenate([np.zeros(0, np.int64), *times]),
        )

    def all_deltas(self, taken: Iterable[TakenPart]) -> Iterator[pa.Table]:
        for one in taken:
            deltas = self._deltas_of(one.part)
            if deltas is not None:
                yield deltas

    def _states(self, taken: TakenPart, shard: Shard | None) -> Iterator[pa.Table]:
        sections = [s for s in taken.wanted if s.kind == "states" and _may_hold(s, shard)]
        if not sections:
            return
        judging = self.routes.judge_states_by_deltas
        touching = self._deltas_of(taken.part) if judging else None
        for section in sections:
            table = self.routes.states(read_section(self.store, taken.part, section), touching)
            if shard is not None and shard.of > 1 and section.shard is None:
                mine = shards_of(table) % shard.of == shard.number
                table = table.filter(pa.array(mine))
            if table.num_rows:
                yield table

    def _deltas(self, taken: TakenPart) -> Iterator[pa.Table]:
        """The part's deltas, or its quarantined ones for the sink of those."""
        for section in (s for s in taken.wanted if s.kind != "states"):
            table = read_section(self.store, taken.part, section)
            if section.kind == "deltas":
                table = self.routes.deltas(table)
                if not self.payloads:
                    table = _without_payload(table)
            if table.num_rows:
                yield table

    def _deltas_of(self, part: ChangePart) -> pa.Table | None:
        found = [s for s in part.sections if s.kind == "deltas"]
        return read_section(self.store, part, found[0]) if found else None


def _may_hold(section: Section, shard: Shard | None) -> bool:
    return shard is None or section.shard is None or section.shard % shard.of == shard.number


def _by_dimensions(states: list[pa.Table]) -> Iterable[list[pa.Table]]:
    groups = defaultdict(list)
    for table in states:
        groups[dimensions_of(table)].append(table)
    return groups.values()


def _merged(states: list[pa.Table], *, several: bool) -> pa.Table:
    table = pa.concat_tables(states)
    return newest_of(table, topics=True) if several else table  # a trigger has a vector once


def _cut(table: pa.Table, rows_max: int | None) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, rows_max or table.num_rows):
        yield table.slice(start, rows_max)


def columns_of(feed: Feed) -> tuple[int, ...]:
    states = STATES if feed & Feed.STATES else ()
    deltas = (DELTAS,) if feed & (Feed.DELTAS | Feed.PAYLOADS) else ()
    return (*states, *deltas)


def _without_payload(table: pa.Table) -> pa.Table:
    at = table.schema.get_field_index("payload")
    if at < 0 or table["payload"].null_count == table.num_rows:
        return table
    return table.set_column(at, table.schema.field(at), pa.nulls(table.num_rows, pa.binary()))
