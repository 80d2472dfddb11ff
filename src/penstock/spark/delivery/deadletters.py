"""Rows that a sink can never take, on their way to its dead letters.

The DLQ of a sink is a queue topic on the node, one per source topic: `<topic>-dlq-<sink>`. What
goes there are deltas, whatever the sink is fed: a refused *state* stands for the deltas that made
it, in the triggers that the write covered.

The order matters: the sink took the others, then the letters are written, then the cursor moves.
Whoever dies in between does all of it again; the sink takes the same rows once and refuses the
same rows again, and the letters' producer keys make the second writing of them a repetition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import SinkRejected
from penstock.log.crash import crash_point
from penstock.sinks import letters
from penstock.sinks.protocol import Work
from penstock.spark.delivery.routes import vector_keys
from penstock.spark.delivery.selection import Selection


@dataclass(frozen=True, kw_only=True)
class DeadLetters:
    """The DLQ of one sink."""

    box: letters.LetterBox
    selection: Selection
    sink: str

    def take(self, work: Work, rejected: SinkRejected) -> int:
        """Write what `rejected` speaks of to the DLQ; the number of letters. Durable on return."""
        crash_point("delivery.rejected.before")
        deltas = self._deltas(work, rejected)
        reason = {
            letters.REASON: rejected.message,
            letters.ERROR: rejected.code,
            letters.SINK: self.sink,
        }
        written = self.box.post(
            deltas,
            to=lambda topic: letters.dead_letter_topic(topic, self.sink),
            pipeline=work.pipeline,
            purpose=f"dlq-{self.sink}",
            reasons=[reason] * deltas.num_rows,
        )
        crash_point("delivery.rejected.after")
        return written

    def _deltas(self, work: Work, rejected: SinkRejected) -> pa.Table:
        table = work.states if rejected.table == "states" else work.deltas
        assert table is not None, f"rows of a table that the work does not have: {rejected.table}"
        rows = table.take(pa.array(rejected.rows, pa.int64()))
        if rejected.table == "deltas":
            return rows
        wanted = vector_keys(rows)
        found = [
            deltas.filter(pc.is_in(vector_keys(deltas), value_set=wanted))
            for deltas in self._all(range(work.first, work.last + 1))
        ]
        return pa.concat_tables(found)

    def _all(self, triggers: Iterable[int]) -> Iterable[pa.Table]:
        for trigger in triggers:
            for part in self.selection.changes.manifest(trigger).parts:
                deltas = self.selection.deltas_of(part)
                if deltas is not None:
                    yield deltas
