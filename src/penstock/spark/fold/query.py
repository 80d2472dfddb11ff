"""Spark's half of a pipeline: the query that turns ranges of the log into committed triggers.

The query runs on threads of Spark's; `step` looks after it from the pipeline's. It is started again
when it ended by an error that passes (a node that is away), and reading pauses while the change log
holds more than it may.

    ranges (slot, topic, partition, first, last) ─► task of the slot ─► part (JSON)

Spark groups the trigger's ranges by slot, hands each slot's head to a Python worker, keeps the head
that comes back with the trigger's state, and brings the parts to the driver. Rows never pass
through Spark: the worker reads the range from the node itself, and the part names a file.

How many rows a trigger takes is adapted after each and told to the source through `rate.json`.
Utilisation is a trigger's time over `target_trigger_s`. Only a trigger that took most of what it
might counts: one that found little to read says nothing of how much it could bear.

    {"version": 1, "rows": 120000, "rate": 120000}

`rows` is what the source reads before each trigger, 0 while reading pauses; `rate` is where the
next run begins.

What ended a query is told as the error that was raised where it happened (`cause_of`). An error of
a task, or of the source's own process, reaches the driver as text: Spark's exception quotes the
Python traceback. The last of Penstock's errors in it is the cause.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pandas as pd
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessor,
    StatefulProcessorHandle,
)

from penstock import errors
from penstock.errors import Corruption, PenstockError
from penstock.log.crash import crash_point
from penstock.node.observe.logs import get_logger
from penstock.propagation.flow.rate import AdaptiveRate
from penstock.spark.fold.changes import ChangeLog, ChangePart
from penstock.spark.fold.partition_step import FoldHead, FoldPlan, PartitionStep
from penstock.spark.fold.state_folder import CANDIDATES_PER_TASK, PipelineIdentity, StateFolder
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.ranges import ReadRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = get_logger(__name__)
POLL_S: Final = 0.1
BACKOFF_S_BASE: Final = 0.5  # before a query is started again; doubles with each failure in a row
BACKOFF_S_CAP: Final = 30.0
IDLE_POLLS: Final = 3  # without a trigger under way, before a paused query counts as idle
PAUSED_SHARE: Final = 0.8  # of the bytes at which reading pauses, where it goes on
_TASKS: Final = "spark.sql.shuffle.partitions"
_EMPTY_TRIGGERS: Final = "spark.sql.streaming.noDataMicroBatches.enabled"


class FoldQuery:
    def __init__(
        self,
        settings: PipelineSettings,
        *,
        spark: SparkSession,
        folder: StateFolder,
        identity: PipelineIdentity,
        changes: ChangeLog,
        plan: FoldPlan,
    ) -> None:
        self._settings, self._spark, self._folder = settings, spark, folder
        self._identity, self._changes, self._plan = identity, changes, plan
        self._rate = TriggerRate(folder.rate_file, settings)
        self._query: StreamingQuery | None = None
        self._available_now = False
        self._failure: BaseException | None = None  # of a commit, as it was raised
        self._failures = 0  # in a row
        self._restart_at = 0.0
        self._progress: dict[str, Any] = {}  # of the last trigger
        self.restarts = 0
        self.last_error: PenstockError | None = None

    # --- the query ---

    def start(self, *, available_now: bool = False) -> None:
        self._available_now = available_now
        self._rate.resume()
        self._start_query()

    def _start_query(self) -> None:
        self._failure = None
        stream = folded(self._ranges(), identity=self._identity, plan=self._plan)
        writer = (
            stream.writeStream.queryName(self._settings.name)
            .outputMode("append")
            .option("checkpointLocation", str(self._folder.checkpoint))
            .foreachBatch(self._commit)
        )
        if self._available_now:
            writer = writer.trigger(availableNow=True)
        else:
            ms = round(self._settings.trigger_interval_s * 1000)
            writer = writer.trigger(processingTime=f"{ms} milliseconds")
        with _conf(self._spark, {_TASKS: str(self._identity.tasks), _EMPTY_TRIGGERS: "false"}):
            self._query = writer.start()

    def _ranges(self) -> DataFrame:
        node = self._plan.node
        options = {
            "url": node.url,
            "topics": ",".join(self._settings.topics),
            "mode": "ranges",
            "rateFile": str(self._folder.rate_file),
            "apiKey": node.api_key,
            "apiKeyFile": node.api_key_file,
            "tls": node.tls,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return self._spark.readStream.format("penstock").options(**given).load()

    def _commit(self, frame: DataFrame, trigger: int) -> None:
        """Called by Spark with what the trigger's tasks returned."""
        try:
            rows = frame.collect()
            parts = [msgspec.json.decode(row["part"], type=ChangePart) for row in rows]
            if len({(part.topic, part.partition) for part in parts}) != len(parts):
                raise Corruption("a trigger holds two ranges of one partition")
            crash_point("pipeline.commit.before")
            self._changes.commit(trigger, parts)
            crash_point("pipeline.commit.after")
            self._folder.snapshots.prune()
        except BaseException as error:
            self._failure = error
            raise

    # --- looking after it ---

    def step(self, *, undelivered: int) -> bool:
        """Wait a moment and see to the query; False once it has read all it was asked for."""
        query = self._query
        if query is None:
            time.sleep(POLL_S)
            if time.monotonic() >= self._restart_at:
                self._start_query()
                self.restarts += 1
            return True
        try:
            ended = query.awaitTermination(POLL_S)  # type: ignore[arg-type]  # takes fractions
        except Exception as error:  # noqa: BLE001  the query's boundary: sorted out right here
            self._ended_by(self._failure or error)
            return True
        self._observe(query)
        self._regulate(undelivered)
        return not ended

    def _ended_by(self, error: BaseException) -> None:
        cause = cause_of(error)
        self.last_error = cause
        if not cause.retryable:
            raise cause from error
        delay = min(BACKOFF_S_CAP, BACKOFF_S_BASE * 2**self._failures)
        self._failures += 1
        self._query, self._restart_at = None, time.monotonic() + delay
        log.warning(
            "query ended and will be started again", error=cause.message, delay_s=round(delay, 1)
        )

    def _observe(self, query: StreamingQuery) -> None:
        """Take in the figures of a trigger that has ended since the last look."""
        found = query.lastProgress
        if found is None or not found["numInputRows"]:
            return
        place = (str(query.runId), found["batchId"])
        if place == self._progress.get("place"):
            return
        self._failures = 0
        seconds = found["durationMs"].get("triggerExecution", 0) / 1000
        rows, begin, end, newest = rows_of(found["sources"][0])
        first = self._progress.get("place", ("",))[0] != str(query.runId)
        self._progress = {
            "place": place, "trigger": found["batchId"], "seconds": seconds, "sequences": rows,
            "from": begin, "to": end, "lag": newest,
            "durations_ms": {name: int(ms) for name, ms in found["durationMs"].items()},
        }  # fmt: skip
        if not first:  # the first trigger of a run starts the workers, too
            self._rate.observe(rows, seconds)

    def _regulate(self, undelivered: int) -> None:
        if self._available_now:
            return  # a query that ends by itself would take a pause for the end
        limit = self._settings.changes_bytes_max
        if undelivered > limit and not self._rate.paused:
            log.warning("reading pauses", undelivered_bytes=undelivered, limit=limit)
            self._rate.pause()
        elif undelivered < limit * PAUSED_SHARE and self._rate.paused:
            log.info("reading goes on", undelivered_bytes=undelivered)
            self._rate.resume()

    def stop(self, *, timeout_s: float) -> None:
        """Let the trigger under way finish, begin no other, end the query."""
        query, self._query = self._query, None
        if query is None:
            return
        self._rate.pause()
        deadline = time.monotonic() + timeout_s
        idle = 0
        while query.isActive and idle < IDLE_POLLS and time.monotonic() < deadline:
            idle = 0 if query.status["isTriggerActive"] else idle + 1
            time.sleep(POLL_S)
        query.stop()
        self._rate.resume()

    def describe(self) -> dict[str, Any]:
        progress = {name: value for name, value in self._progress.items() if name != "place"}
        return {
            "topics": list(self._settings.topics),
            "tasks": self._identity.tasks,
            "rows_per_trigger": self._rate.rows,
            "paused": self._rate.paused,
            "restarts": self.restarts,
            "waiting": self._query is None,
            "last_error": None if self.last_error is None else self.last_error.to_wire(),
            **progress,
        }


@contextmanager
def _conf(spark: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    """Settings of a query: it copies its session's when it starts, and others may use that."""
    before = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, known in before.items():
            spark.conf.set(name, str(known))


def rows_of(source: Any) -> tuple[int, Any, Any, int]:
    """Sequences that a trigger covered, its offsets, and how many were still to come."""
    begin, end, newest = (_offsets(source[name]) for name in _OFFSETS)
    rows = sum(n - begin.get(place, 1) for place, n in end.items())
    behind = sum(max(0, n - end.get(place, 1)) for place, n in newest.items())
    return rows, begin, end, behind


_OFFSETS: Final = ("startOffset", "endOffset", "latestOffset")


def _offsets(text: Any) -> dict[str, int]:
    tree = json.loads(text) if isinstance(text, str) else (text or {})
    return {f"{topic}/{p}": n for topic, found in (tree or {}).items() for p, n in found.items()}


HEAD: Final = "head string"
PART: Final = "part string"


class FoldProcessor(StatefulProcessor):
    """Folds the range of a slot. Pickled to the workers, so it holds nothing but the plan."""

    def __init__(self, plan: FoldPlan) -> None:
        self._plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._head = handle.getValueState("head", HEAD)

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        ranges = sorted(_ranges(rows), key=lambda found: found.first)
        stored = self._head.get()
        head = None if stored is None else msgspec.json.decode(stored[0], type=FoldHead)
        parts = []
        for found in ranges:
            head, part = PartitionStep(self._plan, found).run(head)
            parts.append(msgspec.json.encode(part).decode())
        if head is not None:
            self._head.update((msgspec.json.encode(head).decode(),))
        yield pd.DataFrame({"part": parts})

    def close(self) -> None:
        return


def _ranges(rows: Iterator[pd.DataFrame]) -> Iterator[ReadRange]:
    for frame in rows:
        columns = (frame[name].tolist() for name in ("topic", "partition", "first", "last"))
        for topic, partition, first, last in zip(*columns, strict=True):
            yield ReadRange(topic, int(partition), int(first), int(last))


def folded(ranges: DataFrame, *, identity: PipelineIdentity, plan: FoldPlan) -> DataFrame:
    slots = F.create_map(
        *(
            F.lit(value)
            for topic, known in identity.topics.items()
            for partition, slot in enumerate(known.slots)
            for value in (f"{topic}/{partition}", slot)
        )
    )
    place = F.concat(F.col("topic"), F.lit("/"), F.col("partition").cast("string"))
    slotted = ranges.select(
        slots[place].cast("int").alias("slot"),
        "topic",
        "partition",
        F.col("from").alias("first"),  # `from` is no name that a Python row could have
        F.col("to").alias("last"),
    )
    return slotted.groupBy("slot").transformWithStateInPandas(
        statefulProcessor=FoldProcessor(plan),
        outputStructType=PART,
        outputMode="Append",
        timeMode="None",
    )


def slot_candidates(spark: SparkSession, *, tasks: int, wanted: int) -> list[tuple[int, int]]:
    """Integers, each with the task that Spark sends it to. Enough of them for `wanted` slots."""
    count = CANDIDATES_PER_TASK * (tasks + wanted)
    numbers = spark.range(count).select(F.col("id").cast("int").alias("slot"))
    rows = numbers.select("slot", F.expr(f"pmod(hash(slot), {tasks})").alias("task")).collect()
    return [(row["slot"], row["task"]) for row in rows]


VERSION: Final = 1
FULL_SHARE: Final = 0.5  # of the rate, from which on a trigger counts


class RateFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    rows: int
    rate: int


class TriggerRate:
    def __init__(self, path: Path, settings: PipelineSettings) -> None:
        self._path, self._target_s = path, settings.target_trigger_s
        bounds = settings.rows_per_trigger
        initial = min(max(_known(path) or bounds.initial, bounds.min), bounds.max)
        self._rate = AdaptiveRate(initial=initial, minimum=bounds.min, maximum=bounds.max)
        self.paused = False
        self._write()

    @property
    def rows(self) -> int:
        """Rows that the next trigger may take, when reading is not paused."""
        return int(self._rate.rate)

    def observe(self, rows: int, seconds: float) -> None:
        """A trigger took `rows` in `seconds`."""
        if rows < self.rows * FULL_SHARE:
            return
        self._rate.adjust(seconds / self._target_s)
        self._write()

    def pause(self) -> None:
        self.paused = True
        self._write()

    def resume(self) -> None:
        self.paused = False
        self._write()

    def _write(self) -> None:
        """Replaced in one step, without a sync: after a crash an older rate will do."""
        content = RateFile(rows=0 if self.paused else self.rows, rate=self.rows)
        new = self._path.with_name(f"{self._path.name}.tmp")
        new.write_bytes(msgspec.json.encode(content))
        new.rename(self._path)


def _known(path: Path) -> int | None:
    """The rate of the last run; None if there was none, or its file cannot be read any more."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RateFile).rate
    except (FileNotFoundError, msgspec.DecodeError):
        return None


_RAISED: Final = re.compile(r"penstock\.errors\.(\w+): ([^\n]*)")
# Spark gives a Python process ten seconds to start, which a busy machine may outlast.
_LATE: Final = "Python worker failed to connect back"
_NAMED: Final = re.compile(r"^[\w.]*(?:Error|Exception)\b: .*", re.MULTILINE)


def cause_of(error: BaseException) -> PenstockError:
    """The error that ended a query; `Fatal` if Spark gave up for reasons of its own."""
    if isinstance(error, PenstockError):
        return error
    text = str(error)
    for name, message in reversed(_RAISED.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, PenstockError):
            return _made(kind, message)
    if _LATE in text:
        return errors.Unavailable(_LATE)
    named = _NAMED.findall(text)
    return errors.Fatal(named[-1] if named else text.split("\n", 1)[0] or type(error).__name__)


def _made(kind: type[PenstockError], message: str) -> PenstockError:
    if issubclass(kind, errors.InvalidArgument):
        return kind(message, field="unknown")
    return kind(message)
