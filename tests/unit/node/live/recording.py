"""Sinks that keep in memory what they get, and fail when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pyarrow as pa

from penstock.errors import SinkRejected, Unavailable
from penstock.sinks.protocol import Feed, Work


class Recording:
    """What is not lost when the node restarts: everything is kept by the sink's `store`."""

    feed = Feed.DELTAS
    ordered = True
    stores: ClassVar[dict[str, Recording]] = {}

    def __init__(self, name: str, *, store: str) -> None:
        self.name = name
        self.store = store
        known = self.stores.get(store)
        self.works: list[Work] = [] if known is None else known.works
        self.state: dict[str, Any] = {"failing": False, "refuse": "", "opens": 0}
        if known is not None:
            self.state = known.state
        self.slow_s = 0.0  # that every write takes
        self.free = threading.Event()
        self.free.set()
        self.stores[store] = self

    def open(self) -> None:
        self.state["opens"] += 1
        if self.state["failing"]:
            raise Unavailable("the sink is down")

    def write(self, work: Work) -> None:
        self.free.wait(30)
        time.sleep(self.slow_s)
        if self.state["failing"]:
            raise Unavailable("the sink is down")
        self.works.append(work)
        table = work.deltas if work.deltas is not None else work.states
        assert table is not None
        names = table["vector_id"].to_pylist()
        refused = [row for row, name in enumerate(names) if name == self.state["refuse"]]
        if refused:
            which = "deltas" if work.deltas is not None else "states"
            raise SinkRejected("not this one", rows=refused, table=which)

    def cursor(self) -> int | None:
        return None

    def scan(self) -> Iterator[pa.RecordBatch]:
        return iter(())

    def reset(self) -> None:
        self.works.clear()

    def close(self) -> None:
        return

    @property
    def ordinals(self) -> list[int]:
        tables = [work.deltas for work in self.works if work.deltas is not None]
        return [number for table in tables for number in table["ordinal"].to_pylist()]


class Inline(Recording):
    """It may be written to by the loop."""

    inline = True


class RecordingStates(Recording):
    feed = Feed.STATES
    ordered = False

    @property
    def vectors(self) -> dict[tuple[str, str], tuple[int, bool, list[float]]]:
        """The newest state of each vector: revision, deleted, values."""
        found: dict[tuple[str, str], tuple[int, bool, list[float]]] = {}
        for work in self.works:
            for row in [] if work.states is None else work.states.to_pylist():
                key = (row["namespace"], row["vector_id"])
                state = (row["revision"], row["deleted"], row["vector"])
                if key not in found or state[0] > found[key][0]:
                    found[key] = state
        return found


class RecordingBoth(RecordingStates):
    """As a lake is fed."""

    feed = Feed.STATES | Feed.DELTAS
    ordered = True


class Forgetful(RecordingStates):
    """It holds nothing when it is opened for the first time."""

    def cursor(self) -> int | None:
        return 0
