"""What happened, as JSON lines: for the checker, and for whoever looks for a cause.

`events-<topic>.jsonl` holds the events of `verification.events`. `operations.jsonl` holds one
object for each request of a client and for each fault: what it was, when it began and ended (in
microseconds of one clock), how it ended (ok, failed, unknown) and the ids or tokens it was about.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from penstock.errors import CallerError, LeaseLost, PenstockError, SequenceConflict
from verification.events import AnyEvent

_OFFSET_US: Final = (time.time_ns() - time.monotonic_ns()) // 1000
REFUSALS: Final = (CallerError, LeaseLost, SequenceConflict)  # that is how it is, not "unknown"


def now_us() -> int:
    """Wall time of when this began, counted on without jumps."""
    return time.monotonic_ns() // 1000 + _OFFSET_US


class Operation:
    """One request under way; whoever made it tells how it ended."""

    def __init__(self, kind: str, by: str) -> None:
        self.kind, self.by = kind, by
        self.began_us = now_us()
        self.outcome = "ok"
        self.details: dict[str, Any] = {}

    def failed(self, error: BaseException) -> None:
        self.outcome = "failed" if isinstance(error, REFUSALS) else "unknown"
        self.details["error"] = f"{type(error).__name__}: {error}"[:300]


class History:
    """Open files; close it before they are read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._operations = (folder / "operations.jsonl").open("wb")
        self._events: dict[str, BinaryIO] = {}
        self.outcomes: Counter[str] = Counter()  # by "kind outcome"
        self.acknowledged_us = now_us()  # when an enqueue was last acknowledged
        self.silence_us = 0  # the longest time without one

    def add(self, topic: str, event: AnyEvent) -> None:
        file = self._events.get(topic)
        if file is None:
            file = self._events[topic] = self.events_path(topic).open("wb")
        file.write(msgspec.json.encode(event) + b"\n")

    def events_path(self, topic: str) -> Path:
        return self._folder / f"events-{topic}.jsonl"

    def acknowledged(self) -> None:
        """An enqueue was answered: the cluster is alive."""
        now = now_us()
        self.silence_us = max(self.silence_us, now - self.acknowledged_us)
        self.acknowledged_us = now

    @contextmanager
    def operation(self, kind: str, by: str) -> Iterator[Operation]:
        """Write down what the block does. Errors of the cluster end here; the outcome tells."""
        operation = Operation(kind, by)
        try:
            yield operation
        except (PenstockError, TimeoutError) as error:
            operation.failed(error)
        except BaseException as error:
            operation.failed(error)
            raise
        finally:
            self.write(operation)

    def write(self, operation: Operation) -> None:
        self.outcomes[f"{operation.kind} {operation.outcome}"] += 1
        line = {
            "kind": operation.kind,
            "by": operation.by,
            "began_us": operation.began_us,
            "ended_us": now_us(),
            "outcome": operation.outcome,
            **operation.details,
        }
        self._operations.write(msgspec.json.encode(line) + b"\n")

    def flush(self) -> None:
        for file in (self._operations, *self._events.values()):
            file.flush()

    def close(self) -> None:
        for file in (self._operations, *self._events.values()):
            file.close()
