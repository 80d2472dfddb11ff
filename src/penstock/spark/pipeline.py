"""A running pipeline: Spark folds the log into triggers, sinks follow the triggers.

    node ──► ranges ──► fold (tasks) ──► manifest ──► delivery ──► sinks

Two halves that meet in the change log alone. The fold ends with the manifest; a sink that lags or
fails is not its business, until so much is undelivered that reading pauses. Whatever kills this
process, the next `run`, here or on another machine, goes on from the newest manifest.

    with Pipeline(settings) as pipeline:      # starts it
        …                                     # and stops it, once its sinks have caught up
    Pipeline(settings).run(available_now=True)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.errors import FailedPrecondition, WrongEpoch
from penstock.node.observe.logs import get_logger
from penstock.spark.delivery.attachment import (
    RoutedSink,
    SinkSpec,
    attach,
    feed_of,
    letter_box,
    node_of,
    transforms_of,
)
from penstock.spark.delivery.delivery import PipelineDelivery
from penstock.spark.delivery.lakes import with_lakes
from penstock.spark.delivery.tasks import SparkSinkJobs
from penstock.spark.delivery.transform import Transform
from penstock.spark.fold.driver import FoldDriver
from penstock.spark.fold.partition_step import FoldPlan
from penstock.spark.fold.state import ChangeLog, DriverClaim, claim_identity, heads_for
from penstock.spark.grants import await_executors
from penstock.spark.session import spark_session
from penstock.spark.settings import PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = get_logger(__name__)
STOP_S: Final = 60.0  # for a trigger under way, and for a sink's write under way
DRAIN_S_MAX: Final = 7 * 24 * 3600.0  # of a run that ends by itself: until its sinks have it all


class Pipeline:
    """One pipeline, run once. `session` lends it a Spark session; else it makes one of its own.
    `transform` is a function between the fold and the sinks, or some by sink, instead of those that
    the settings name."""

    def __init__(
        self,
        settings: PipelineSettings,
        *,
        session: SparkSession | None = None,
        transform: Transform | Mapping[str, Transform] | None = None,
        metrics: str | None = None,
    ) -> None:
        self.settings = settings.validate()
        self._session, self._metrics, self._transform = session, metrics, transform
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
        """Ask for a stop and return at once; asked again, neither the trigger under way nor the
        sinks are waited for."""
        if self._wanted.is_set():
            self._drain_s = 0.0
            self.ingest.cancel()
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
        claim = DriverClaim(settings.store)
        self._open.callback(claim.close)
        node, store = node_of(settings), settings.store.open()
        access = node.access()
        configs = [access.delta_config(topic) for topic in settings.topics]
        identity = claim_identity(store, name=settings.name, propagation=settings.propagation)
        sinks = attach(settings, pipeline=identity.id, node=node)
        transforms = transforms_of(settings, sinks, self._transform)
        sinks = with_lakes(sinks, settings, transforms=transforms)
        self.changes = ChangeLog(store, claim=claim.number)
        newest = self.changes.newest()
        heads = heads_for(configs, {} if newest is None else newest.heads)
        plan = FoldPlan(
            pipeline=identity.id,
            node=node,
            state=settings.store,
            claim=claim.number,
            dimensions={config.name: config.dimensions for config in configs},
            options=identity.propagation,
            snapshot_deltas=settings.snapshot_deltas,
            feed=feed_of(sinks),
            sharded=any(getattr(one.sink, "shards", 0) > 1 for one in sinks),
        )
        session = self._spark()
        self.ingest = FoldDriver(
            settings, spark=session, claim=claim, changes=self.changes, heads=heads, plan=plan
        )
        lost = SinkSpec.of_quarantine(pipeline=identity.id, node=node)
        jobs = SparkSinkJobs(
            session,
            fold=plan,
            name=settings.name,
            sinks=len(sinks),
            transforms=transforms,
        )
        self.delivery = PipelineDelivery(
            self.changes,
            sinks,
            pipeline=identity.id,
            letters=letter_box(node),
            quarantine=RoutedSink(sink=lost.build(), spec=lost),
            jobs=jobs,
            name=settings.name,
            options=settings.delivery,
            metrics=self._metrics,
            describe=self.ingest.describe,
        )

    def _spark(self) -> SparkSession:
        settings, session = self.settings, self._session
        if session is None:
            session = spark_session(
                f"penstock-{settings.name}",
                master=settings.master,
                cores=settings.cores,
                spare=len(settings.sinks) + 1,
                conf=settings.spark,
            )
            self._open.callback(session.stop)
        await_executors(session, timeout_s=settings.executors_s)
        return session

    # --- its life ---

    def _watch(self) -> None:
        """The pipeline's own thread: folds trigger after trigger, then ends everything."""
        try:
            while not self._wanted.is_set():
                if not self.ingest.step(undelivered=self.delivery.undelivered_bytes):
                    break
        except BaseException as error:  # noqa: BLE001  handed to whoever waits for the end
            self._failure = error
            # Whoever has taken over serves the sinks, too.
            self._drain_s = 0.0 if isinstance(error, WrongEpoch) else self.settings.drain_s
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
