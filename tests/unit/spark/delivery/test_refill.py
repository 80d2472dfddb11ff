"""Where a sink that lacks something is filled from, and what it waits for."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.unit.spark.delivery.delivering import (
    QUICK,
    FileSink,
    Triggers,
    delivery_of,
    eventually,
    state,
)

from penstock.errors import NotFound
from penstock.sinks.lake import LakeSink
from penstock.sinks.protocol import Feed
from penstock.sinks.schema import states_schema
from penstock.spark.delivery.attachment import RoutedSink, SinkSpec
from penstock.spark.delivery.backlog import CursorFile, SinkCursor
from penstock.spark.delivery.delivery import PipelineDelivery
from penstock.spark.delivery.refill import lost
from penstock.spark.delivery.selection import SinkRoutes
from penstock.spark.delivery.tasks import SinkOrder, SinkOutcome, SinkTask
from penstock.spark.fold.state import ChangePart, ChangeWriter, FoldHead, Manifest, TopicHeads
from penstock.spark.settings import SinkSettings
from penstock.spark.source.access import LogStatus
from penstock.spark.source.options import Connecting
from penstock.spark.store import StoreAddress

HISTORY, STATES = Feed.DELTAS, Feed.STATES
PERSISTENT = msgspec.structs.replace(QUICK, breaker_open_s=0.05)


def manifest(**head: Any) -> Manifest:
    known = {0: FoldHead(**{"start": 1, "sequence": 100} | head)}
    heads = {"t": TopicHeads(id=7, dimensions=2, partitions=known)}
    return Manifest(trigger=0, claim=0, heads=heads)


def log_from(first: int) -> Callable[[str], list[LogStatus]]:
    return lambda _: [LogStatus(topic_id=7, partition=0, sequence_first=first, readable=100)]


@pytest.mark.parametrize(
    ("first", "feed", "head", "begin"),
    [
        (1, HISTORY, {}, None),
        (2, HISTORY, {}, 1),
        (30, HISTORY, {"start": 30}, None),  # the pipeline itself began there
        (30, HISTORY, {"snapshots": ("s",), "snapshot_sequence": 40}, 1),
        (41, STATES, {"snapshots": ("s",), "snapshot_sequence": 40}, None),
        (42, STATES, {"snapshots": ("s",), "snapshot_sequence": 40}, 41),
        (200, STATES, {"snapshots": ("s",), "snapshot_sequence": 100}, None),
        (2, STATES, {}, 1),
        (2, STATES, {"sequence": 0}, None),  # nothing was folded
    ],
)
def test_what_the_log_has_lost_is_told(
    first: int, feed: Feed, head: dict[str, Any], begin: int | None
) -> None:
    found = lost(manifest(**head), feed, status=log_from(first))
    assert (found is None) == (begin is None)
    if begin is not None:
        assert f"t/0 begins at sequence {first}" in str(found)
        assert f"from sequence {begin} on" in str(found)


def test_the_log_of_a_topic_that_is_gone_is_lost() -> None:
    def status(topic: str) -> list[LogStatus]:
        raise NotFound(f"no topic {topic}")

    assert lost(manifest(), STATES, status=status) == "no topic t"


class FakeJobs:
    """Fills with one vector that is named after where it comes from."""

    def __init__(self, triggers: Triggers, *, lost: str | None) -> None:
        self.state = StoreAddress(url="nowhere")
        self.said, self.triggers = lost, triggers
        self.filled_as_of: list[int] = []

    def lost(self, feed: Feed, manifest: Manifest) -> str | None:
        return self.said

    def fill(self, sink: str, feed: Feed, manifest: Manifest) -> list[ChangePart]:
        return self._files("log", manifest)

    def fill_from(
        self, lake: SinkSpec, sink: str, feed: Feed, manifest: Manifest
    ) -> list[ChangePart]:
        return self._files(lake.settings.name, manifest)

    def _files(self, origin: str, manifest: Manifest) -> list[ChangePart]:
        self.filled_as_of.append(manifest.trigger)
        common = {"namespace": "default", "log_time_ms": 1, "topic": "vectors"}
        rows = [state(f"from {origin}", 1, 2, **common)]
        writer = ChangeWriter(self.triggers.log.store, claim=0, topic="vectors", partition=0)
        writer.add("states", pa.Table.from_pylist(rows, states_schema(2)), lane=2)
        return [writer.finish(first=1, last=1, counts={})]

    def filled(self, sink: str) -> tuple[int, int]:
        return 1, 2

    def cancel(self, sink: str) -> None: ...

    def slots(self) -> int:
        return 1

    def open(self, order: SinkOrder) -> SinkOutcome:
        raise NotImplementedError

    def run(self, order: SinkOrder, tasks: Sequence[SinkTask]) -> list[SinkOutcome]:
        raise NotImplementedError


@pytest.fixture
def old(tmp_path: Path) -> Triggers:
    """A change log whose first triggers are deleted: another sink has them."""
    triggers = Triggers(tmp_path)
    for revision in (1, 2, 3):
        triggers.commit(("a", revision))
    first = delivery_of(triggers, FileSink(tmp_path, name="first"), folder=tmp_path)
    first.start()
    assert first.drain(20)
    first.stop()
    assert triggers.log.first == 2
    return triggers


def lake_of(folder: Path) -> SinkSpec:
    settings = SinkSettings(kind="lake", name="lake", options={"path": str(folder / "lake")})
    return SinkSpec(settings=settings, pipeline="p-1", node=Connecting(url="penstock://h:1"))


def started(
    old: Triggers, folder: Path, *others: FileSink, lost: str | None, **routed: Any
) -> tuple[PipelineDelivery, FileSink, FakeJobs]:
    sink, jobs = FileSink(folder, name="new"), FakeJobs(old, lost=lost)
    attached = RoutedSink(sink=sink, **routed)
    first = FileSink(folder, name="first")
    delivery = delivery_of(
        old, first, attached, *others, folder=folder, jobs=jobs, options=PERSISTENT
    )
    delivery.start()
    return delivery, sink, jobs


def test_a_new_sink_is_filled_from_the_log_where_that_reaches(
    old: Triggers, tmp_path: Path
) -> None:
    delivery, sink, jobs = started(old, tmp_path, lost=None, lake=lake_of(tmp_path))
    assert delivery.drain(20)
    delivery.stop()
    assert sink.states() == {"from log": 1}
    assert jobs.filled_as_of == [2]


def test_without_a_lake_it_fails_by_name_until_the_log_has_it(
    old: Triggers, tmp_path: Path
) -> None:
    delivery, sink, jobs = started(old, tmp_path, lost="the log is short", lakeless="so is this")
    meter = delivery.workers[1].runner.meter
    eventually(lambda: meter.last_error is not None)
    assert meter.last_error is not None
    assert "the log is short; so is this" in meter.last_error["message"]
    assert 'backfill = "none"' in meter.last_error["message"]
    jobs.said = None
    assert delivery.drain(20)
    delivery.stop()
    assert sink.states() == {"from log": 1}


def test_vectors_do_not_tell_what_a_route_by_operation_takes(old: Triggers, tmp_path: Path) -> None:
    routes = SinkRoutes.parse(["op=delete"])
    delivery, sink, jobs = started(old, tmp_path, lost=None, routes=routes)
    meter = delivery.workers[1].runner.meter
    eventually(lambda: meter.last_error is not None)
    delivery.stop()
    assert meter.last_error is not None
    assert "its routes go by what deltas are like" in meter.last_error["message"]
    assert (jobs.filled_as_of, sink.states()) == ([], {})


def test_a_lake_that_is_behind_is_waited_for_while_triggers_come(
    old: Triggers, tmp_path: Path
) -> None:
    CursorFile(old.log.store, "lake").save(SinkCursor(position=(1,)))
    slow = FileSink(tmp_path, name="lake")  # in the place of the lake's worker
    slow.hang = threading.Event()
    delivery, sink, jobs = started(
        old, tmp_path, slow, lost="the log is short", lake=lake_of(tmp_path)
    )
    worker = delivery.workers[1]
    eventually(lambda: worker.runner.meter.failures > 1)
    assert (worker.filling or {})["from"] == "lake"
    old.commit(("b", 1))
    failures = worker.runner.meter.failures
    eventually(lambda: worker.runner.meter.failures > failures + 1)
    assert (worker.filling or {})["trigger"] == 2
    slow.hang.set()
    assert delivery.drain(20)
    delivery.stop()
    assert jobs.filled_as_of == [2]
    assert sink.states() == {"from lake": 1, "b": 1}


def test_no_trigger_is_kept_for_a_lake_that_lacks_something_itself(
    old: Triggers, tmp_path: Path
) -> None:
    spec, file = lake_of(tmp_path), CursorFile(old.log.store, "lake")
    file.save(SinkCursor(position=(0,)))
    delivery, _, _ = started(old, tmp_path, lost="the log is short", lake=spec)
    worker = delivery.workers[1]
    eventually(lambda: worker.runner.meter.failures > 1)
    old.commit(("b", 1))
    eventually(lambda: worker.durable_through == 3)
    delivery.stop()


def test_a_lake_that_lacks_the_beginning_is_refused_by_name(old: Triggers, tmp_path: Path) -> None:
    LakeSink("lake", path=str(tmp_path / "lake"), pipeline="p-1").open()
    CursorFile(old.log.store, "lake").save(SinkCursor(position=(2,), started=1))
    delivery, _, _ = started(old, tmp_path, lost="the log is short", lake=lake_of(tmp_path))
    meter = delivery.workers[1].runner.meter
    eventually(lambda: meter.last_error is not None)
    delivery.stop()
    assert meter.last_error is not None
    assert "lake was not given what came before trigger 1" in meter.last_error["message"]
    assert 'backfill = "none"' in meter.last_error["message"]
