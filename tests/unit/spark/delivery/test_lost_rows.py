"""Sinks that lose rows while a pipeline runs: noticed by their marks, and filled; without Spark."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.unit.spark.delivery.delivering import (
    PIPELINE,
    Triggers,
    delivery_of,
    eventually,
    state,
)

from penstock.errors import PenstockError
from penstock.sinks.index import Index, IndexSink
from penstock.sinks.protocol import Feed, SinkCommit
from penstock.sinks.schema import states_schema
from penstock.spark.delivery import worker
from penstock.spark.delivery.attachment import RoutedSink, SinkSpec
from penstock.spark.delivery.backlog import SinkCursor
from penstock.spark.delivery.delivery import PipelineDelivery
from penstock.spark.delivery.tasks import SinkOrder, SinkOutcome, SinkTask, write_share
from penstock.spark.fold.state import ChangeLog, ChangePart, ChangeWriter, Manifest
from penstock.spark.settings import SinkSettings
from penstock.spark.source.options import Connecting
from penstock.spark.store import StoreAddress


@pytest.fixture(autouse=True)
def without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triggers are deleted at once, instead of when the quarantine's cursor is saved."""
    monkeypatch.setattr(worker, "SAVE_S", 0.0)


class InlineJobs:
    """Tasks that run in the thread that asks for them. What the fold holds is said by hand."""

    def __init__(self, folder: Path) -> None:
        self.state = StoreAddress(url=str(folder))
        self.folded: dict[str, int] = {}
        self.fillings = 0
        self.meanwhile: Callable[[], None] = lambda: None  # what happens while a sink is filled

    def slots(self) -> int:
        return 1

    def open(self, order: SinkOrder) -> SinkOutcome:
        return SinkOutcome()

    def run(self, order: SinkOrder, tasks: Sequence[SinkTask]) -> list[SinkOutcome]:
        return [write_share(order, task) for task in tasks]

    def fill(self, sink: str, feed: Feed, manifest: Manifest) -> list[ChangePart]:
        self.fillings += 1
        writer = ChangeWriter(self.state.open(), claim=0, topic="vectors", partition=0, sink=sink)
        common = {"namespace": "default", "log_time_ms": 1, "topic": "vectors"}
        rows = [state(name, revision, 2, **common) for name, revision in self.folded.items()]
        writer.add("states", pa.Table.from_pylist(rows, states_schema(2)), lane=2)
        part = writer.finish(first=1, last=1, counts={})
        self.meanwhile()
        return [part]

    def lost(self, feed: Feed, manifest: Manifest) -> str | None:
        return None

    def fill_from(
        self, lake: SinkSpec, sink: str, feed: Feed, manifest: Manifest
    ) -> list[ChangePart]:
        raise NotImplementedError

    def filled(self, sink: str) -> tuple[int, int]:
        return 0, 0

    def cancel(self, sink: str) -> None:
        return


class Running:
    """A pipeline with an index, whose triggers are deleted as soon as the index has them."""

    def __init__(self, folder: Path, *, claim: int = 1, **settings: Any) -> None:
        self.path, self.folder = folder / "index", folder
        self.triggers, self.jobs = Triggers(folder), InlineJobs(folder)
        self.settings = SinkSettings(
            kind="index", name="index", options={"path": str(self.path)}, **settings
        )
        self.start(claim=claim)

    def start(self, *, claim: int) -> None:
        self.triggers.log = ChangeLog(self.triggers.log.store, claim=claim)
        nowhere = Connecting(url="penstock://127.0.0.1:1")
        spec = SinkSpec(settings=self.settings, pipeline=PIPELINE, node=nowhere)
        one = RoutedSink(sink=spec.build(), spec=spec)
        self.delivery: PipelineDelivery = delivery_of(
            self.triggers, one, folder=self.folder, jobs=self.jobs
        )
        self.worker = self.delivery.workers[0]
        self.delivery.start()

    def put(self, name: str, revision: int = 1) -> None:
        self.jobs.folded[name] = revision
        self.triggers.commit((name, revision))

    def put_away(self, *names: str) -> None:
        """Put vectors, each in a trigger, and wait until only the newest of these is left."""
        for name in names:
            self.put(name)
        eventually(lambda: self.held() == self.jobs.folded)
        eventually(lambda: self.triggers.log.first == self.triggers.log.last)

    def held(self) -> dict[str, int]:
        """What the index holds; it cannot always be read while it is exchanged."""
        try:
            rows = [row for batch in Index(str(self.path)).scan() for row in batch.to_pylist()]
        except PenstockError:
            return {}
        return {row["vector_id"]: row["revision"] for row in rows}

    def leave(self, position: int, *, claim: int, incarnation: str) -> SinkCommit:
        """Leave a mark, as some driver of the pipeline would."""
        commit = SinkCommit(
            pipeline=PIPELINE,
            first=position,
            last=position,
            position=(position,) * 4,
            claim=claim,
            incarnation=incarnation,
        )
        sink = IndexSink("index", path=str(self.path), pipeline=PIPELINE)
        sink.open()
        sink.commit([], commit)
        return commit


def removed(running: Running) -> None:
    shutil.rmtree(running.path)


def exchanged(running: Running) -> None:
    shutil.rmtree(running.path)
    shutil.copytree(running.folder / "copy", running.path)


def _copy(index: Path, copy: Path) -> None:
    """Without what is being written at the moment, and may be renamed meanwhile."""
    shutil.copytree(index, copy, ignore=shutil.ignore_patterns(".*"))


@pytest.mark.parametrize("happens", [removed, exchanged])
def test_an_index_that_lost_rows_is_filled_with_its_next_write(
    tmp_path: Path, happens: Callable[[Running], None]
) -> None:
    running = Running(tmp_path)
    running.put_away("a", "b")
    _copy(running.path, tmp_path / "copy")
    running.put_away("c", "d")
    happens(running)

    running.put("e")

    eventually(lambda: running.held() == running.jobs.folded)
    eventually(lambda: running.worker.state == "idle")
    assert running.jobs.fillings == 1
    assert "was emptied or exchanged" in str(running.worker.runner.meter.last_error)
    running.put_away("f")
    assert running.jobs.fillings == 1
    running.delivery.stop()


def test_an_index_that_is_emptied_while_it_is_filled_is_filled_all_the_same(
    tmp_path: Path,
) -> None:
    running = Running(tmp_path)
    running.put_away("a", "b", "c")
    running.jobs.meanwhile = lambda: removed(running)
    removed(running)

    running.put("d")

    eventually(lambda: running.held() == running.jobs.folded)
    eventually(lambda: running.worker.state == "idle")
    assert running.jobs.fillings == 1  # its files are still there
    running.delivery.stop()


def test_a_copy_that_is_removed_while_it_is_opened_is_not_believed(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.put_away("a", "b", "c")
    _copy(running.path, tmp_path / "copy")
    running.put_away("d")  # which the change log keeps: a copy needs nothing else
    sink: Any = running.worker.sink
    commit = sink.commit

    def once(*given: Any) -> None:
        sink.commit = commit
        commit(*given)
        removed(running)

    exchanged(running)
    sink.commit = once
    running.put("e")

    eventually(lambda: running.held() == running.jobs.folded)
    running.delivery.stop()


def test_an_index_that_is_not_to_be_filled_halts_and_stays_so(tmp_path: Path) -> None:
    running = Running(tmp_path, backfill="none")
    running.put_away("a", "b", "c")
    removed(running)

    for claim in (2, 3):
        running.put("d", claim)
        eventually(lambda: running.worker.halted is not None)
        assert "rebuild it" in str(running.worker.halted)
        running.delivery.stop()
        running.start(claim=claim)
    eventually(lambda: running.worker.halted is not None)
    running.delivery.stop()


def test_the_mark_of_an_overtaken_driver_is_not_taken_for_that_of_a_copy(tmp_path: Path) -> None:
    running = Running(tmp_path, claim=2)
    running.put_away("a", "b", "c")
    told = running.worker.cursor.told
    assert told is not None
    assert told.claim == 2
    running.leave(0, claim=1, incarnation=told.incarnation)
    running.put_away("d")
    running.delivery.stop()
    running.leave(1, claim=1, incarnation=told.incarnation)

    running.start(claim=3)
    running.put_away("e")

    assert running.jobs.fillings == 0
    assert running.worker.cursor.told is not None
    assert running.worker.cursor.told.incarnation == told.incarnation
    assert running.worker.runner.meter.failures == 0
    running.delivery.stop()


def test_triggers_deleted_while_a_sink_goes_back_are_filled_in(tmp_path: Path) -> None:
    """The sink was found empty, and is to begin anew with triggers that are deleted just then."""
    running = Running(tmp_path)
    running.put_away("a", "b", "c")
    running.delivery.stop()
    removed(running)
    begun = running.leave(-1, claim=2, incarnation="second").mark
    running.start(claim=2)
    eventually(lambda: running.worker.state == "idle")
    shutil.rmtree(running.path)
    running.leave(-1, claim=2, incarnation="second")
    before = running.jobs.fillings
    running.worker.cursor = SinkCursor(position=(-1,) * 4, told=begun)

    running.put("d")

    eventually(lambda: running.held() == running.jobs.folded)
    assert running.jobs.fillings == before + 1
    running.delivery.stop()


def test_a_cursor_file_keeps_what_the_sink_told(tmp_path: Path) -> None:
    running = Running(tmp_path, claim=7)
    running.put_away("a")
    running.delivery.stop()
    (file,) = (tmp_path / "sinks").glob("00000007-index.json")
    told = msgspec.json.decode(file.read_bytes())["told"]
    assert (told["position"], told["claim"], len(told["incarnation"])) == ([0, 0, 0, 0], 7, 32)
