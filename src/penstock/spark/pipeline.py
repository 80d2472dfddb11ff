"""A running pipeline: Spark folds the log into triggers, sinks follow the triggers.

    node ──► source (ranges) ──► stage (fold) ──► commit (manifest) ──► delivery ──► sinks
                  ▲                                    │
                  └──────── rate.json ◄────────────────┘

Two halves that meet in the change log alone. The query ends with the manifest; a sink that lags or
fails is not its business, until so much is undelivered that reading pauses. Whatever kills this
process, the next `run` goes on with the trigger that was under way: Spark's checkpoint has its
ranges, and folding them again gives what it gave, or would have given.

    with Pipeline(settings) as pipeline:      # starts it
        …                                     # and stops it, once its sinks have caught up
    Pipeline(settings).run(available_now=True)
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from penstock.errors import FailedPrecondition
from penstock.node.observe.logs import get_logger
from penstock.spark.attachment import attach, feed_of, letter_box, node_of
from penstock.spark.delivery.delivery import PipelineDelivery
from penstock.spark.fold.changes import ChangeLog
from penstock.spark.fold.partition_step import FoldPlan
from penstock.spark.fold.query import FoldQuery, slot_candidates
from penstock.spark.fold.state_folder import StateFolder
from penstock.spark.session import spark_session
from penstock.spark.settings import PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = get_logger(__name__)
# Spark gives a task any worker process. With as many tasks as cores, partitions change workers
# every other trigger, and each time their state is made anew. Half as many leave a core to the
# node, the JVM and the sinks besides.
CORES_PER_TASK: Final = 2
STOP_S: Final = 60.0  # for a trigger under way, and for a sink's write under way
DRAIN_S_MAX: Final = 7 * 24 * 3600.0  # of a run that ends by itself: until its sinks have it all


class Pipeline:
    """One pipeline, run once. `session` lends it a Spark session; else it makes one of its own."""

    def __init__(
        self,
        settings: PipelineSettings,
        *,
        session: SparkSession | None = None,
        metrics: str | None = None,
    ) -> None:
        self.settings = settings.validate()
        self._session, self._metrics = session, metrics
        self._open = ExitStack()
        self._wanted = threading.Event()  # somebody asked for a stop
        self._failure: BaseException | None = None
        self._watcher: threading.Thread | None = None
        self._drain_s = settings.drain_s

    def run(self, *, available_now: bool = False) -> dict[str, Any]:
        """Run until `stop`, or with `available_now` until all that is in the log now has reached
        the sinks. Returns the last status; raises what ended it."""
        self.start(available_now=available_now)
        return self.wait()

    def start(self, *, available_now: bool = False) -> None:
        """Start everything and return; a failure to start leaves nothing behind."""
        if self._watcher is not None:
            raise FailedPrecondition("a pipeline is started once")
        try:
            self._build()
            self.delivery.start()
            self._open.callback(self._stop_delivery)
            self.ingest.start(available_now=available_now)
        except BaseException:
            self._drain_s = 0.0
            self._open.close()
            raise
        if available_now:
            self._drain_s = DRAIN_S_MAX
        self._watcher = threading.Thread(
            target=self._watch, name=f"penstock-{self.settings.name}", daemon=True
        )
        self._watcher.start()

    def request_stop(self) -> None:
        """Ask for a stop and return at once; asked again, the sinks are not waited for."""
        if self._wanted.is_set():
            self._drain_s = 0.0
        self._wanted.set()

    def stop(self) -> dict[str, Any]:
        """Finish the trigger under way, let the sinks catch up within `drain_s`, and end."""
        self._wanted.set()
        return self.wait()

    def wait(self) -> dict[str, Any]:
        """Wait for the end, whoever asks for it; the last status."""
        assert self._watcher is not None, "a pipeline that was not started has no end"
        while self._watcher.is_alive():
            self._watcher.join(1.0)  # a wait without an end would not let signals through
        if self._failure is not None:
            raise self._failure
        return self.status()

    def status(self) -> dict[str, Any]:
        return self.delivery.status()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exited: object) -> None:
        self.stop()

    # --- putting it together ---

    def _build(self) -> None:
        settings = self.settings
        folder = StateFolder(settings.state)
        self._open.callback(folder.close)
        node = node_of(settings)
        access = node.access()
        configs = [access.delta_config(topic) for topic in settings.topics]
        identity = folder.identity(
            name=settings.name, tasks=settings.tasks or 0, propagation=settings.propagation
        )
        sinks = attach(settings, pipeline=identity.id, node=node)
        spark = self._spark()
        partitions = sum(config.partitions for config in configs)
        if not identity.tasks:
            cores = spark.sparkContext.defaultParallelism
            tasks = max(1, min(partitions, cores // CORES_PER_TASK))
            identity = msgspec.structs.replace(identity, tasks=tasks)
        slots = partitions + sum(len(topic.slots) for topic in identity.topics.values())
        candidates = slot_candidates(spark, tasks=identity.tasks, wanted=slots)
        identity = identity.with_topics(configs, candidates=candidates)
        folder.save(identity)
        changes = self._changes(folder)
        plan = FoldPlan(
            pipeline=identity.id,
            node=node,
            state=settings.state,
            dimensions={name: topic.dimensions for name, topic in identity.topics.items()},
            options=identity.propagation,
            snapshot_deltas=settings.snapshot_deltas,
            feed=feed_of(sinks),
        )
        self.changes = changes
        self.ingest = FoldQuery(
            settings, spark=spark, folder=folder, identity=identity, changes=changes, plan=plan
        )
        self.delivery = PipelineDelivery(
            changes,
            sinks,
            folder=settings.state,
            pipeline=identity.id,
            letters=letter_box(node),
            name=settings.name,
            options=settings.delivery,
            metrics=self._metrics,
            describe=self.ingest.describe,
        )

    def _spark(self) -> SparkSession:
        """The session that was lent to us, or one that ends with us."""
        if self._session is not None:
            return self._session
        settings = self.settings
        session = spark_session(
            f"penstock-{settings.name}",
            master=settings.master,
            cores=settings.cores,
            conf=settings.spark,
        )
        self._open.callback(session.stop)
        return session

    def _changes(self, folder: StateFolder) -> ChangeLog:
        changes = ChangeLog(folder.changes)
        if changes.last is not None and not any(folder.checkpoint.glob("offsets/*")):
            raise FailedPrecondition(
                f"{folder.path} has triggers but Spark's checkpoint is gone: start over with"
                " another state folder",
                field="state",
            )
        swept = changes.sweep() + folder.snapshots.sweep()
        if swept:
            log.info("files of an interrupted trigger removed", files=swept)
        return changes

    # --- its life ---

    def _watch(self) -> None:
        """The pipeline's own thread: looks after the query, then ends everything."""
        try:
            while not self._wanted.is_set():
                if not self.ingest.step(undelivered=self.delivery.undelivered_bytes):
                    break
            self.ingest.stop(timeout_s=STOP_S)
        except BaseException as error:  # noqa: BLE001  handed to whoever waits for the end
            self._failure = error
            log.error("pipeline ends", error=str(error))
        try:
            self._open.close()
        except BaseException as error:  # noqa: BLE001  as above; the first failure is the cause
            self._failure = self._failure or error

    def _stop_delivery(self) -> None:
        began = time.monotonic()
        while not self.delivery.drain(0.2):
            if time.monotonic() - began >= self._drain_s:
                log.warning("stopped before every sink had caught up")
                break
        hanging = self.delivery.stop(STOP_S if self._drain_s else 1.0)
        if hanging:
            log.warning("sinks did not return", sinks=hanging)
