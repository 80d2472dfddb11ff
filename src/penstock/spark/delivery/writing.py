"""One planned write, from the sink to its dead letters. It remembers how far it came, so that a
failure half-way is not followed by the whole from the start.

A write of an ordered sink is one `Work`: its triggers become visible together or not at all. One
of an unordered sink may be cut into several, each within the bound on rows; the cursor moves when
the last of them is in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.errors import SinkRejected
from penstock.log.crash import crash_point
from penstock.sinks.protocol import Sink, Work
from penstock.spark.delivery.deadletters import DeadLetters
from penstock.spark.delivery.planning import Plan
from penstock.spark.delivery.selection import Selected


@dataclass(kw_only=True)
class Write:
    plan: Plan
    selected: Selected
    rows_max: int | None  # None: all in one work
    done: int = 0  # works that the sink holds
    refused: SinkRejected | None = None  # of the work at `done`, which is written but for these
    works: list[Work] = field(init=False)

    def __post_init__(self) -> None:
        self.works = list(_cut(self.selected.work, self.rows_max)) if self.selected.rows else []

    def carry_out(
        self, sink: Sink, letters: DeadLetters, *, posted: Callable[[int, int], None]
    ) -> None:
        """Write what is not yet written; `posted` is told of rejected rows and their letters.

        Raises what the sink or the dead letters' topic raise; call it again then.
        """
        while self.done < len(self.works):
            work = self.works[self.done]
            if self.refused is None:
                crash_point("delivery.write.before")
                try:
                    sink.write(work)
                except SinkRejected as refused:
                    self.refused = refused
                crash_point("delivery.write.after")
            if self.refused is not None and self.refused.rows:
                posted(len(self.refused.rows), letters.take(work, self.refused))
            self.refused = None
            self.done += 1


def _cut(work: Work, rows_max: int | None) -> list[Work]:
    if work.states is None or rows_max is None or work.states.num_rows <= rows_max:
        return [work]
    assert work.deltas is None, "only states are written in pieces"
    starts = range(0, work.states.num_rows, rows_max)
    return [replace(work, states=work.states.slice(start, rows_max)) for start in starts]
