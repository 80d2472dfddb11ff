"""`status.json`: what a pipeline does at this moment, for people, scripts and dashboards.

It is replaced about once a second, in one step, without a sync: after a crash an old one or none
is as good, and the time in it says how old it is. `docs/delivery.md` describes every field.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import Corruption, NotFound

if TYPE_CHECKING:
    from penstock.spark.delivery.worker import SinkWorker

VERSION: Final = 1
NAME: Final = "status.json"
Status = dict[str, Any]


def process_status() -> Status:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def sink_status(worker: SinkWorker, *, now: float, now_ms: int) -> Status:
    """One sink; `now` is monotonic."""
    meter, cursor = worker.runner.meter, worker.cursor
    lag = worker.planner.lag(cursor)
    waits_s = 0.0 if lag.oldest_ms is None else max(0.0, (now_ms - lag.oldest_ms) / 1000)
    return {
        "name": worker.name,
        "state": worker.state,
        "ordered": not worker.planner.laned,
        "internal": worker.internal,
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
        "last_error": None
        if meter.last_error is None
        else {"message": meter.last_error.message, "time_ms": meter.last_error.time_ms},
    }


def write_status(folder: Path, status: Status) -> None:
    new = folder / f"{NAME}.tmp"
    new.write_text(json.dumps(status), "utf-8")
    new.rename(folder / NAME)


def read_status(folder: Path) -> Status:
    """The last status that was written; `NotFound` if there is none."""
    path = folder / NAME
    try:
        status: Status = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"{folder} has no {NAME}: no pipeline ran on it yet") from None
    except ValueError as error:
        raise Corruption(f"{path} is not JSON: {error}") from error
    if status.get("version") != VERSION:
        raise Corruption(f"{path} has version {status.get('version')}, expected {VERSION}")
    return status
