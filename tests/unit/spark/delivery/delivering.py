"""What the tests of delivery share: triggers on disk, a sink with switches, topics in a file."""

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import NotFound, SinkRejected, Unavailable
from penstock.model.delta import Delta, Op, PriorityClass, encode
from penstock.sinks.protocol import Feed, Items, Work
from penstock.sinks.schema import DELTAS, states_schema
from penstock.sinks.topics import LetterBox
from penstock.spark.delivery.attachment import RoutedSink
from penstock.spark.delivery.delivery import PipelineDelivery
from penstock.spark.fold.state import LANES, ChangeLog, ChangeWriter, Manifest
from penstock.spark.settings import DeliveryOptions
from penstock.spark.store import FolderStore

DIMENSIONS = 2
QUARANTINE = pa.schema([*DELTAS, ("reason", pa.utf8()), ("missing", pa.binary(16))])
PIPELINE = "p-0123456789ab"
FEED = ("states", "deltas", "payloads")
QUICK = DeliveryOptions(
    backoff_s_base=0.001, backoff_s_cap=0.005, poll_s=0.05, status_s=0.05, rows_together_max=1
)


class Triggers:
    """Commits triggers whose deltas are named by hand: (vector, revision) or with a lane."""

    def __init__(self, folder: Path, *, topic: str = "vectors") -> None:
        self.log = ChangeLog(FolderStore(folder))
        self.topic = topic
        self.ordinal = self.quarantined = 0
        self.feed = FEED  # what the manifests say that was written

    def commit(
        self,
        *rows: tuple[Any, ...],
        op: Op = Op.DENSE,
        namespace: str = "default",
        headers: dict[str, str] | None = None,
        quarantine: Iterable[str] = (),
        payloads: bool = False,
        log_time_ms: int | None = None,
    ) -> int:
        """A trigger of one part: a state and a delta per (vector_id, revision, lane=2)."""
        time_ms = time.time_ns() // 1_000_000 if log_time_ms is None else log_time_ms
        found = [(row[0], row[1], row[2] if len(row) > 2 else 2) for row in rows]
        common = {"namespace": namespace, "log_time_ms": time_ms, "topic": self.topic}
        writer = ChangeWriter(self.log.store, claim=0, topic=self.topic, partition=0)
        for lane in range(LANES):
            states = [state(*row, **common) for row in found if row[2] == lane]
            writer.add("states", pa.Table.from_pylist(states, states_schema(2)), lane=lane)
        deltas = [
            delta(self._next(), *row, op=op, headers=headers, payload=payloads, **common)
            for row in found
        ]
        writer.add("deltas", pa.Table.from_pylist(deltas, DELTAS))
        lost = [self._lost(name, **common) for name in quarantine]
        writer.add("quarantine", pa.Table.from_pylist(lost, QUARANTINE))
        trigger = 0 if self.log.last is None else self.log.last + 1
        part = writer.finish(
            first=trigger * 100 + 1, last=trigger * 100 + 100, counts={"read": len(found)}
        )
        manifest = Manifest(trigger=trigger, claim=0, feed=self.feed, parts=(part,))
        self.log.commit(manifest, check=lambda: None)
        return trigger

    def _next(self) -> int:
        self.ordinal += 1
        return self.ordinal

    def _lost(self, vector_id: str, **common: Any) -> dict[str, Any]:
        self.quarantined += 1
        row = delta(self.quarantined, vector_id, 1, 2, payload=True, **common)
        return row | {"reason": "its parent never came", "missing": b"\7" * 16}


def state(vector_id: str, revision: int, lane: int, **common: Any) -> dict[str, Any]:
    return {
        "vector_id": vector_id, "vector": [float(revision), 0.5], "metadata": None,
        "deleted": False, "revision": revision, "time": revision, "sequence": revision,
        "partition": 0, "lane": lane, **common,
    }  # fmt: skip


def delta(
    ordinal: int,
    vector_id: str,
    revision: int,
    lane: int,
    *,
    op: Op = Op.DENSE,
    headers: dict[str, str] | None = None,
    payload: bool = False,
    **common: Any,
) -> dict[str, Any]:
    values = [] if op == Op.DELETE else [float(revision), 0.5]
    made = Delta(
        delta_id=ordinal.to_bytes(16, "big"), namespace=common["namespace"], vector_id=vector_id,
        op=op, origin="tests", time=ordinal, clock={"tests": revision},
        values=np.array(values, np.float32) if values else None, priority=PriorityClass(lane),
    )  # fmt: skip
    return {
        "partition": 0, "sequence": ordinal, "position": ordinal, "ordinal": ordinal,
        "delta_id": made.delta_id, "parent": None, "vector_id": vector_id, "op": int(op),
        "origin": "tests", "time": ordinal, "clock": json.dumps(made.clock),
        "indices": list(range(len(values))), "values": values, "metadata": None,
        "headers": json.dumps(headers) if headers else None, "priority": lane, "original": None,
        "source": 0, "payload": encode(made, dimensions=DIMENSIONS) if payload else None, **common,
    }  # fmt: skip


class FileSink:
    """A sink that is a folder: each write one line of a file, synced, with switches to fail.

    States: the newest revision of a vector wins. Deltas: each ordinal once. Triggers that it holds
    are passed over, as `Sink.write` demands; `effects` counts what really changed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "file",
        feed: Feed = Feed.STATES,
        ordered: bool = False,
        own_cursor: bool = False,
        rejects: Iterable[str] = (),
    ) -> None:
        self.name, self.feed, self.ordered = name, feed, ordered
        self._path = folder / f"{name}.lines"
        self._own_cursor, self._rejects = own_cursor, set(rejects)
        self.failures = 0  # writes that will fail
        self.hang: threading.Event | None = None  # a write waits for it
        self.opened = 0

    def open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        self.opened += 1

    def write(self, work: Work) -> None:
        if self.hang is not None:
            self.hang.wait(60)
        if self.failures:
            self.failures -= 1
            raise Unavailable("switched off")
        held = max((line["last"] for line in self.lines()), default=-1)
        if not (self.ordered and work.last <= held):
            states, deltas = self._states(work), self._deltas(work)
            self._append({"first": work.first, "last": work.last, "s": states, "d": deltas})
        bad = _rejected(work, self._rejects)
        if bad:
            raise SinkRejected("not to my taste", rows=bad, table=_table_name(work))

    def _states(self, work: Work) -> list[list[Any]]:
        held = self.states()
        rows = [] if work.states is None else work.states.to_pylist()
        return [
            [row["vector_id"], row["revision"]]
            for row in rows
            if row["vector_id"] not in self._rejects
            and row["revision"] > held.get(row["vector_id"], 0)
        ]

    def _deltas(self, work: Work) -> list[int]:
        rows = [] if work.deltas is None else work.deltas.to_pylist()
        return [row["ordinal"] for row in rows if row["vector_id"] not in self._rejects]

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def states(self) -> dict[str, int]:
        return {name: revision for line in self.lines() for name, revision in line["s"]}

    def ordinals(self) -> list[int]:
        return [ordinal for line in self.lines() for ordinal in line["d"]]

    def cursor(self) -> int | None:
        return (
            max((line["last"] for line in self.lines()), default=None) if self._own_cursor else None
        )

    def scan(self) -> Iterator[pa.RecordBatch]:
        return iter(())

    def reset(self) -> None:
        self._path.unlink()

    def close(self) -> None:
        return


def _table_name(work: Work) -> str:
    return "deltas" if work.states is None else "states"


def _rejected(work: Work, names: set[str]) -> list[int]:
    table = work.deltas if work.states is None else work.states
    assert table is not None
    return [row for row, name in enumerate(table["vector_id"].to_pylist()) if name in names]


class FileTopics:
    """Topics as a node keeps them, in one file: a producer's sequence is taken once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = 0
        self.created: set[str] = set()

    def create(self, topic: str) -> None:
        self.created.add(topic)

    def append(
        self, topic: str, *, producer: str, epoch: int, items: Items, partition: int
    ) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("no node")
        if topic not in self.created:
            raise NotFound(f"no topic {topic}")
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = {(m["topic"], m["producer"], m["n"]) for m in map(json.loads, file)}
            for row, number in enumerate(items.sequences.tolist()):
                if (topic, producer, number) not in known:
                    file.write(json.dumps(_message(topic, producer, number, items, row)) + "\n")

    def messages(self, topic: str) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [m for m in map(json.loads, lines) if m["topic"] == topic]

    def close(self) -> None:
        return


def _message(topic: str, producer: str, number: int, items: Items, row: int) -> dict[str, Any]:
    assert items.headers is not None and items.priorities is not None
    return {
        "topic": topic, "producer": producer, "n": number,
        "payload": items.payloads[row].as_py().hex(), "priority": int(items.priorities[row]),
        "headers": msgspec.msgpack.decode(items.headers[row].as_py()),
    }  # fmt: skip


def delivery_of(
    triggers: Triggers, *sinks: Any, folder: Path, options: DeliveryOptions = QUICK, **more: Any
) -> PipelineDelivery:
    attached = [sink if isinstance(sink, RoutedSink) else RoutedSink(sink=sink) for sink in sinks]
    topics = more.pop("topics", None) or FileTopics(folder / "topics.lines")
    box = LetterBox(writer=topics, create=topics.create)
    return PipelineDelivery(
        triggers.log, attached, pipeline=PIPELINE, letters=box, options=options, **more
    )  # fmt: skip


def eventually(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)


class FillingJobs:
    """Stands for tasks that fill a sink: they fail until all is well, and then take their time."""

    def __init__(self) -> None:
        self.well, self.done = threading.Event(), threading.Event()

    def lost(self, *_: object) -> str | None:
        """Nothing of the log is."""
        return None

    def fill(self, *_: object) -> list[Any]:
        if not self.well.is_set():
            raise Unavailable("no executor")
        self.done.wait(60)
        return []

    def filled(self, _: str) -> tuple[int, int]:
        return 3, 8


def filled_delivery(folder: Path, jobs: Any, **more: Any) -> PipelineDelivery:
    """Two sinks in a pipeline whose first triggers are gone, one of which was not there then."""
    triggers = Triggers(folder)
    for number in range(3):
        triggers.commit(("a", number + 1))
    old = delivery_of(triggers, FileSink(folder, name="old"), folder=folder)
    old.start()
    assert old.drain(20)
    old.stop()
    sinks = FileSink(folder, name="old"), FileSink(folder, name="new")
    return delivery_of(Triggers(folder), *sinks, folder=folder, jobs=jobs, **more)
