"""What a cluster grants a session: the wait for a first executor, and what the cluster has to give.

A cluster that has too little to spare leaves a session waiting in silence, as Spark only repeats
that a job has not begun. So the wait tells what was asked for and what there is. What there is says
the page of a standalone cluster's master; of other clusters it is not known here.

Where Spark asks for executors when there is work for them (`spark.dynamicAllocation.enabled`), a
session without work is granted none. Then the wait is a job of one task.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import Unavailable
from penstock.node.observe.logs import get_logger

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = get_logger(__name__)
TOLD_S: Final = 30.0  # of waiting, after which it is told
LOOK_S: Final = 0.2
PAGE_S: Final = 2.0  # for a master to show its page
WORKERS_TOLD_MAX: Final = 8
_ASKED: Final = ("spark.executor.memory", "spark.executor.cores", "spark.cores.max")
_STANDALONE: Final = "spark://"
_PAGE: Final = "spark.master.ui.port", "8080"  # the setting of the page's port, and its default
UNKNOWN: Final = "it is not known what the cluster has to spare"


def await_executors(session: SparkSession, *, timeout_s: float) -> None:
    """Wait until a cluster has granted an executor; in local mode there is nothing to wait for.
    What was asked for, and what there is, is logged after TOLD_S. `Unavailable`, which says so too,
    ends the wait."""
    context: Any = session.sparkContext
    if context.master.startswith("local") or _granted(context):
        return
    asked = {name: context.getConf().get(name, "as the cluster says") for name in _ASKED}
    began, told = time.monotonic(), False
    with _some_work(context):
        while not _granted(context):
            waited = time.monotonic() - began
            if waited >= timeout_s:
                wanted = ", ".join(f"{name}: {value}" for name, value in asked.items())
                raise Unavailable(
                    f"{context.master} has granted no executor in {timeout_s:.0f} s; each was to"
                    f" have {wanted}; {_to_spare(context)}"
                )
            if waited >= min(TOLD_S, timeout_s / 2) and not told:
                there = _to_spare(context)
                log.warning(
                    "no executor was granted yet", master=context.master, **asked, there=there
                )
                told = True
            time.sleep(LOOK_S)


def _granted(context: Any) -> bool:
    there = context._jsc.sc().getExecutorMemoryStatus().size() - 1  # the driver is in it
    return bool(there > 0)


@contextmanager
def _some_work(context: Any) -> Iterator[None]:
    """A job of one task while the block runs, where executors are granted for work alone."""
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") != "true":
        yield
        return
    one = context._jvm.java.util.ArrayList()
    one.add(0)
    job = context._jsc.parallelize(one, 1).countAsync()
    try:
        yield
    finally:
        job.cancel(True)


def _to_spare(context: Any) -> str:
    """What the cluster has to spare, in words."""
    if not context.master.startswith(_STANDALONE):
        return UNKNOWN
    port = context.getConf().get(*_PAGE)
    for address in context.master.removeprefix(_STANDALONE).split(","):
        host, _, native = address.rpartition(":")
        page = _page(f"http://{host}:{port}/json/")
        # Another cluster's master may have the page of this port.
        if page.get("status") == "ALIVE" and str(page.get("url", "")).endswith(f":{native}"):
            return spare_of(page)
    return f"{UNKNOWN}: no page of its master at port {port}, which {_PAGE[0]} says"


def _page(url: str) -> dict[str, Any]:
    """What a master tells of itself; nothing if it is not a master that answers there."""
    try:
        with urllib.request.urlopen(url, timeout=PAGE_S) as answer:
            page = json.load(answer)
    except (OSError, ValueError):
        return {}
    return page if isinstance(page, dict) else {}


def spare_of(page: dict[str, Any]) -> str:
    """The free cores and memory of the workers on a standalone master's page."""
    workers = [one for one in page.get("workers", []) if one.get("state") == "ALIVE"]
    if not workers:
        return "it has no workers"
    free = [
        f"{one['host']}:{one['port']} {one['coresfree']} of {one['cores']} cores and"
        f" {one['memoryfree']} of {one['memory']} MiB"
        for one in workers[:WORKERS_TOLD_MAX]
    ]
    more = len(workers) - len(free)
    return f"its workers have free: {', '.join(free)}" + (f", and {more} more" if more else "")
