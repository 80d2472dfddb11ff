"""How far a pipeline and its sinks have come, read from its folder while it runs or rests.

Triggers are Spark's batches: the checkpoint's offsets say up to which sequence a trigger reaches in
every partition, the change log which triggers are committed, and a sink's cursor which of them it
holds. A sink has *reached* a place in the log when the pipeline has folded up to there and the
sink's cursor is at that trigger.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import Corruption
from penstock.spark.delivery.cursors import NONE, CursorFile
from penstock.spark.jobs.ranges import LogRange
from penstock.spark.source.offsets import Offsets, from_json

POLL_S: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One look at a pipeline's folder."""

    last: int  # committed trigger, -1 before the first
    offsets: Offsets  # per partition the sequence behind the last folded one
    cursors: Mapping[str, int]  # the last trigger that each sink holds

    def unfolded(self, ranges: Sequence[LogRange]) -> int:
        """Sequences of these ranges that the pipeline has yet to fold."""
        return sum(max(0, one.last - self.folded(one)) for one in ranges)

    def folded(self, one: LogRange) -> int:
        return self.offsets.get(one.topic, {}).get(one.partition, 1) - 1

    def reached(self, sink: str, ranges: Sequence[LogRange]) -> bool:
        return not self.unfolded(ranges) and self.cursors.get(sink, NONE) >= self.last

    def lag(self, sink: str, ranges: Sequence[LogRange]) -> dict[str, int]:
        """What the sink has before it: triggers that it has to take, and log not folded yet."""
        behind = self.last - self.cursors.get(sink, NONE)
        return {"triggers": max(0, behind), "sequences": self.unfolded(ranges)}


def read_progress(state: Path, sinks: Sequence[str]) -> Progress:
    """How far it is now; a folder that no pipeline has used yet is at the very beginning."""
    # By names alone: a running pipeline deletes manifests while one looks.
    committed = (path.stem for path in (state / "changes").glob("*.json"))
    last = max((int(stem) for stem in committed if stem.isdecimal()), default=NONE)
    offsets = _offsets(state / "checkpoint" / "offsets" / str(last)) if last >= 0 else {}
    cursors = {}
    for name in sinks:
        cursor = CursorFile(path=state / "sinks" / f"{name}.json").load()
        cursors[name] = NONE if cursor is None else cursor.through
    return Progress(last=last, offsets=offsets, cursors=cursors)


def wait_for(
    look: Callable[[], Progress], done: Callable[[Progress], bool], *, timeout_s: float
) -> Progress:
    """Look until it is done or the time is over; the last look."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        left = deadline - time.monotonic()
        if done(found) or left <= 0:
            return found
        time.sleep(min(left, POLL_S))


def _offsets(path: Path) -> Offsets:
    """The end of a trigger, from Spark's log of offsets: a version, metadata, one line a source."""
    lines = path.read_text("utf-8").splitlines()
    try:
        document: dict[str, Any] = json.loads(lines[-1])
        return from_json(document)
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise Corruption(f"{path} does not hold a trigger's offsets: {error}") from error
