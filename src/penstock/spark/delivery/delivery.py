"""Delivery: from committed triggers to every sink, each at its own pace, each row's effect once.

    change log ──► worker of sink A ──► A       one thread, one cursor, one breaker each;
               ├─► worker of sink B ──► B       nobody waits for anybody
               └─► worker of the quarantine ──► <topic>-quarantine
    upkeep: status.json, deletion of triggers that all sinks hold

Why a crash at any moment (`kill -9`, a power cut) neither loses a row nor doubles its effect. A
write goes through these steps, each durable before the next begins:

 1. the trigger's manifest is committed; it never changes, and stays until step 6
 2. ordered sinks: the range about to be written is saved as the cursor's *attempt*
 3. the sink writes, durably
 4. rows it rejected are appended to the DLQ topic, under producer keys made of the log
 5. the cursor is saved: everything up to here is in the sink or its DLQ
 6. once all cursors are past it, the trigger is deleted

*Nothing is lost*: a row leaves the change log at 6, only after 5 of every sink, which is after 3
and 4. A crash before 5 leaves the old cursor, and the rows are delivered again.

*Nothing is doubled*: what is repeated after a crash is 3 and 4. The sink is given the same rows
under the same trigger numbers again (an ordered one exactly the attempt, an unordered one perhaps
cut differently, which it must not mind: it compares revisions) and takes them once, as the
contract of `Sink.write` says. The letters carry the same producer keys, and the node knows them.
Deletion repeats harmlessly.

A cursor that goes backwards only repeats; the one wrong that could lose rows, a cursor ahead of
the change log or a sink behind its beginning, halts that sink instead.

Shutdown is a crash that takes its time: `stop` lets each worker finish its write within a bound,
and lets go of those that do not return. Their cursors stay where they are.

`status.json` tells people, scripts and dashboards what the pipeline does at this moment. It is
replaced about once a second, in one step, without a sync: after a crash an old one or none is as
good, and the time in it says how old it is. `docs/delivery.md` describes every field.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.errors import Corruption, NotFound
from penstock.log.crash import crash_point
from penstock.node.observe.logs import get_logger
from penstock.sinks.letters import LetterBox, QuarantineSink
from penstock.sinks.protocol import Feed, Sink
from penstock.spark.delivery.backlog import QUARANTINE, Backlog
from penstock.spark.delivery.cursors import CursorFile
from penstock.spark.delivery.metrics import PipelineMetrics, Status
from penstock.spark.delivery.selection import ChangeSelection, SinkRoutes, columns_of
from penstock.spark.delivery.worker import SinkWorker
from penstock.spark.fold.changes import ChangeLog
from penstock.spark.settings import DeliveryOptions

log = get_logger(__name__)
VERSION: Final = 1
STATUS_FILE: Final = "status.json"


@dataclass(frozen=True, kw_only=True)
class RoutedSink:
    sink: Sink
    routes: SinkRoutes = field(default_factory=SinkRoutes)


class PipelineDelivery:
    """Serves the sinks of one pipeline from its change log.

    `folder` is the pipeline's state folder, `pipeline` the id of its numbering of triggers, `name`
    what people call it. `letters` takes dead letters and quarantined deltas. `describe`
    adds what the pipeline itself has to say to the status, under `source`.
    """

    def __init__(
        self,
        changes: ChangeLog,
        sinks: Sequence[RoutedSink],
        *,
        folder: Path,
        pipeline: str,
        letters: LetterBox,
        name: str | None = None,
        options: DeliveryOptions | None = None,
        metrics: str | None = None,
        describe: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._changes, self._folder = changes, folder
        self._pipeline, self._name = pipeline, name or pipeline
        self._describe = describe
        self._options = (options or DeliveryOptions()).validate()
        self._backlog = Backlog(changes)
        quarantine = RoutedSink(sink=QuarantineSink(letters))
        self.workers = [
            SinkWorker(
                one.sink,
                columns=(QUARANTINE,) if one is quarantine else columns_of(one.sink.feed),
                backlog=self._backlog,
                selection=ChangeSelection(
                    changes=changes,
                    pipeline=pipeline,
                    routes=one.routes,
                    payloads=bool(one.sink.feed & Feed.PAYLOADS),
                ),
                letters=letters,
                file=CursorFile(folder, one.sink.name),
                options=self._options,
            )
            for one in (*sinks, quarantine)
        ]
        self._state = "starting"
        self._started_ms = time.time_ns() // 1_000_000
        self._stopped = threading.Event()
        self._upkeep = threading.Thread(target=self._keep_up, name="penstock-upkeep", daemon=True)
        self.metrics = PipelineMetrics(
            self.status, lambda: [(w.name, w.runner.meter.freshness) for w in self.workers]
        )
        self._metrics_address = metrics

    def start(self) -> None:
        if self._metrics_address is not None:
            self.metrics.serve(self._metrics_address)
        self._backlog.follow()
        self._state = "running"
        self._report()
        for worker in self.workers:
            worker.runner.start()
        self._upkeep.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every sink holds what is committed now; False if some do not in time.

        A halted sink is not waited for, as nothing would come of it: `halted` names those.
        """
        goal = -1 if self._changes.last is None else self._changes.last
        deadline = time.monotonic() + timeout_s
        while not self.caught_up(goal):
            left = deadline - time.monotonic()
            if left <= 0 or self._stopped.wait(min(left, 0.02)):
                return self.caught_up(goal)
        return True

    def caught_up(self, trigger: int) -> bool:
        return all(w.halted is not None or w.caught_up(trigger) for w in self.workers)

    @property
    def halted(self) -> list[str]:
        """The sinks that an operator must look after."""
        return [worker.name for worker in self.workers if worker.halted is not None]

    def stop(self, timeout_s: float = 10.0) -> list[str]:
        """Stop all threads; returns the sinks that did not return in time and were let go of."""
        self._state = "stopping"
        for worker in self.workers:
            worker.runner.stop()
        self._changes.wake()
        deadline = time.monotonic() + timeout_s
        hanging = [w.name for w in self.workers if not w.join(deadline - time.monotonic())]
        self._stopped.set()
        if self._upkeep.ident is not None:
            self._upkeep.join()
        self._state = "stopped"
        self._prune()
        self._report()
        self.metrics.close()
        return hanging

    def status(self) -> Status:
        now_ms = time.time_ns() // 1_000_000
        first, last = self._changes.first, self._changes.last
        return {
            "version": VERSION,
            "pipeline": self._name,
            "id": self._pipeline,
            "state": self._state,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_ms": self._started_ms,
            "updated_ms": now_ms,
            "metrics_port": self.metrics.port,
            "changes": {
                "first": first,
                "last": last,
                "triggers": 0 if first is None or last is None else last - first + 1,
                "bytes": self._backlog.bytes_after(-1),
            },
            "partitions": self._backlog.partitions(),
            "sinks": [_sink_status(worker, now_ms=now_ms) for worker in self.workers],
            "source": self._describe(),
        }

    # --- upkeep ---

    def _keep_up(self) -> None:
        while not self._stopped.wait(self._options.status_s):
            try:
                self._backlog.follow()
                self._prune()
                self._report()
            except Exception:  # the thread's boundary; the next round tries again
                log.exception("upkeep failed")

    @property
    def durable_through(self) -> int:
        """The last trigger that no sink will ask for again."""
        return min(worker.durable_through for worker in self.workers)

    @property
    def undelivered_bytes(self) -> int:
        return self._backlog.bytes_after(self.durable_through)

    def _prune(self) -> None:
        through = self.durable_through
        if self._changes.prune(through):
            crash_point("delivery.prune.after")
            self._backlog.forget(through)

    def _report(self) -> None:
        new = self._folder / f"{STATUS_FILE}.tmp"
        new.write_text(json.dumps(self.status()), "utf-8")
        new.rename(self._folder / STATUS_FILE)


def _sink_status(worker: SinkWorker, *, now_ms: int) -> Status:
    now = time.monotonic()
    meter, cursor = worker.runner.meter, worker.cursor
    lag = worker.planner.lag(cursor)
    waits_s = 0.0 if lag.oldest_ms is None else max(0.0, (now_ms - lag.oldest_ms) / 1000)
    return {
        "name": worker.name,
        "state": worker.state,
        "ordered": not worker.planner.laned,
        "internal": isinstance(worker.sink, QuarantineSink),
        "trigger": cursor.through,
        "lanes": list(cursor.position) if worker.planner.laned else None,
        "started": cursor.started,
        "lag": {
            "triggers": lag.triggers,
            "rows": lag.rows,
            "bytes": lag.bytes,
            "seconds": round(waits_s, 3),
        },
        "visible_s": meter.freshness.recent(now=now),
        "rows": meter.rows,
        "rows_per_s": round(meter.rows_per_s(now=now), 1),
        "coalesced": meter.coalesced,
        "writes": meter.writes,
        "write_s": round(meter.write_s, 3),
        "retries": meter.failures,
        "rejected": meter.rejected,
        "dead_letters": meter.dead_letters,
        "breaker": worker.runner.retry.describe(now=now) | {"opened": meter.opens},
        "busy_s": round(meter.busy_s(now=now), 3),
        "last_error": None if meter.last_error is None else asdict(meter.last_error),
    }


def read_status(folder: Path) -> Status:
    path = folder / STATUS_FILE
    try:
        status: Status = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"{folder} has no {STATUS_FILE}: no pipeline ran on it yet") from None
    except ValueError as error:
        raise Corruption(f"{path} is not JSON: {error}") from error
    if status.get("version") != VERSION:
        raise Corruption(f"{path} has version {status.get('version')}, expected {VERSION}")
    return status
