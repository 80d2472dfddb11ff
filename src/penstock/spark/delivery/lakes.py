"""A pipeline's lake where the log no longer reaches back: which one may stand in for the log, up to
which trigger it holds everything, and what it has of a log partition.

A lake keeps how every vector is and every released delta, so it can give what retention has deleted
from the log. It may do so for whoever is fed no more than it has: it keeps no message as it was
sent, only what its routes take, and of vectors only what its transform left.

It holds everything *from the beginning* if it was given the first trigger, or filled with what was
before. Up to where, its cursor and its own mark say together: a lake that was emptied or restored
holds what its mark says until it is filled again. A history is looked at besides, ordinal by
ordinal: somebody may have deleted old rows of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import FailedPrecondition, InvalidArgument
from penstock.sinks.lake import HISTORY, NOTHING, VECTORS, LakeSink, LogPlace, deltas_of
from penstock.sinks.protocol import Feed
from penstock.sinks.schema import chosen_rows, states_by_dimensions, winners
from penstock.spark.delivery.attachment import RoutedSink, SinkSpec
from penstock.spark.delivery.backlog import NONE, CursorFile
from penstock.spark.delivery.selection import SinkRoutes
from penstock.spark.settings import PipelineSettings, SinkSettings
from penstock.spark.store import Store

DELTAS_ROWS: Final = 100_000  # of a history that are in memory at once
_JUDGED: Final = ["namespace", "vector_id", "revision"]


# --- which lake ---


def lake_for(
    settings: PipelineSettings,
    *,
    feed: Feed,
    routes: SinkRoutes,
    but: Container[str] = (),
    transforms: Container[str] = (),
) -> SinkSettings:
    """The first lake, `but` for some, that holds all that is to be fed by these routes.
    `transforms` names sinks to which the program gave a function. Raises `FailedPrecondition` that
    says why there is none."""
    why = "there is no lake to take it from"
    if feed & Feed.PAYLOADS:
        raise FailedPrecondition("a lake does not keep messages as they were sent", field="sink")
    for one in settings.sinks:
        if one.kind != "lake" or one.name in but:
            continue
        transformed = one.transform or settings.transform.function or one.name in transforms
        if transformed and feed & Feed.STATES:
            why = f"the vectors of {one.name} are those of its transform"
        elif not _takes(SinkRoutes.parse(one.route), feed=feed, routes=routes):
            why = f"the routes of {one.name} leave some of it out"
        else:
            return one
    raise FailedPrecondition(why, field="sink")


def _takes(lake: SinkRoutes, *, feed: Feed, routes: SinkRoutes) -> bool:
    """Whether a lake with these routes holds what is asked for. A part of a history cannot be
    proved to be whole."""
    return lake.all if feed & Feed.DELTAS else lake.cover(routes)


def with_lakes(
    sinks: Sequence[RoutedSink], settings: PipelineSettings, *, transforms: Container[str] = ()
) -> list[RoutedSink]:
    """The sinks, each with the lake that it may be filled from. `InvalidArgument` if a sink is to
    be filled from a lake and there is none for it."""
    return [_with_lake(one, settings, transforms) for one in sinks]


def _with_lake(
    one: RoutedSink, settings: PipelineSettings, transforms: Container[str]
) -> RoutedSink:
    assert one.spec is not None, "it is made of settings"
    backfill, name = one.spec.settings.backfill, one.sink.name
    if backfill == "log":
        return replace(one, lakeless='backfill = "log" rules lakes out')
    try:
        lake = _lake_of_sink(one, settings, transforms)
    except FailedPrecondition as error:
        if backfill == "lake":
            raise InvalidArgument(
                f"sink {name} cannot be filled from a lake: {error.message}", field="backfill"
            ) from error
        return replace(one, lakeless=error.message)
    return replace(one, lake=msgspec.structs.replace(one.spec, settings=lake))


def _lake_of_sink(
    one: RoutedSink, settings: PipelineSettings, transforms: Container[str]
) -> SinkSettings:
    if one.sink.feed & Feed.STATES and one.routes.judge_states_by_deltas:
        raise FailedPrecondition(
            "its routes go by what deltas are like, and vectors do not tell", field="sink"
        )
    but = (one.sink.name,)
    return lake_for(settings, feed=one.sink.feed, routes=one.routes, but=but, transforms=transforms)


# --- how far it holds everything ---


@contextmanager
def opened_lake(spec: SinkSpec) -> Iterator[LakeSink]:
    lake = spec.build()
    assert isinstance(lake, LakeSink), "it was looked for by its kind"
    lake.open()
    try:
        yield lake
    finally:
        lake.close()


def lake_position(store: Store, spec: SinkSpec) -> int:
    """The last trigger up to which a lake holds everything, NONE before the first. Raises
    `FailedPrecondition` if it does not from the beginning on."""
    name = spec.settings.name
    cursor = CursorFile(store, name).load()
    if cursor is None:
        return NONE
    if cursor.started > 0:
        raise FailedPrecondition(
            f"{name} was not given what came before trigger {cursor.started}", field="sink"
        )
    with opened_lake(spec) as lake:
        return cursor.reconciled(lake.mark()).through


# --- what it has of a log partition ---


def lake_deltas(lake: LakeSink, place: LogPlace, *, through: int) -> Iterator[pa.Table]:
    """All deltas of a partition that were released up to the sequence `through`, in the order of
    release, as DELTAS. Raises `FailedPrecondition` if the history lacks some of them."""
    last = _last_ordinal(lake, place, through=through)
    for start in range(1, last + 1, DELTAS_ROWS):
        end = min(start + DELTAS_ROWS, last + 1)
        ordinal = pc.field("ordinal")
        where = _here(place) & (ordinal >= start) & (ordinal < end)
        batches = list(lake.history.batches(HISTORY.names, where=where))
        rows = pa.Table.from_batches(batches).sort_by("ordinal") if batches else None
        if rows is None or not np.array_equal(rows["ordinal"].to_numpy(), np.arange(start, end)):
            raise _incomplete(lake, place)
        yield deltas_of(rows)


def _last_ordinal(lake: LakeSink, place: LogPlace, *, through: int) -> int:
    """The ordinal of the last delta that was released up to `through`; 0: none was. The first and
    the newest row must be there; what is between them shows when it is read."""
    first, newest, last = 1, NOTHING, 0
    for batch in lake.history.batches(["ordinal", "position"], where=_here(place)):
        if len(batch):
            ordinals, positions = (batch[n].to_numpy() for n in ("ordinal", "position"))
            first = int(ordinals.min()) if newest == NOTHING else min(first, int(ordinals.min()))
            newest = max(newest, int(positions.max()))
            last = max(last, int(ordinals[positions <= through].max(initial=0)))
    if first != 1 or newest != lake.history.reaches(place):
        raise _incomplete(lake, place)
    return last


def _incomplete(lake: LakeSink, place: LogPlace) -> FailedPrecondition:
    topic, partition = place
    return FailedPrecondition(
        f"the history of {lake.name} does not have every delta of {topic}/{partition}", field="sink"
    )


def lake_states(lake: LakeSink, place: LogPlace) -> Iterator[pa.Table]:
    """How every vector of a partition is, deleted ones too, as STATES."""
    chosen = winners(lake.vectors.batches(_JUDGED, where=_here(place)))
    rows = lake.vectors.batches(VECTORS.names, where=_here(place))
    for batch in chosen_rows(rows, chosen):
        yield from states_by_dimensions(pa.Table.from_batches([batch]))


def _here(place: LogPlace) -> Any:
    return (pc.field("topic") == place[0]) & (pc.field("partition") == place[1])
