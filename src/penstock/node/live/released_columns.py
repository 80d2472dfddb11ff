"""What one feed released, on its way to many: routed and encoded once for all who want the same."""

from __future__ import annotations

from penstock.model.columns import Buffer
from penstock.model.delivery import CHANGES
from penstock.propagation.flow.route import DeltaRoute, routed
from penstock.propagation.fold.releases import ReleasedRows

Routes = tuple[DeltaRoute, ...]  # none: everything


class Outgoing:
    """The rows of a feed, through a position."""

    __slots__ = ("_bodies", "_routed", "rows", "through")

    def __init__(self, rows: ReleasedRows, through: int) -> None:
        self.rows, self.through = rows, through
        self._routed: dict[Routes, ReleasedRows] = {}
        self._bodies: dict[int, Buffer] = {}

    def rows_for(self, routes: Routes) -> ReleasedRows:
        if not routes or not len(self.rows):
            return self.rows
        found = self._routed.get(routes)
        if found is None:
            found = self._routed[routes] = wanted(self.rows, routes)
        return found

    def body_of(self, rows: ReleasedRows) -> Buffer:
        """The encoded body of all of these rows, which `rows_for` gave."""
        found = self._bodies.get(id(rows))
        if found is None:
            found = self._bodies[id(rows)] = encode(rows)
        return found


def wanted(rows: ReleasedRows, routes: Routes) -> ReleasedRows:
    """Those that some route takes, each once."""
    if not routes:
        return rows
    mask = routed(rows.batch, routes)
    return rows if mask.all() else rows.take(mask)


def encode(rows: ReleasedRows) -> bytes:
    """Rows in CHANGES layout."""
    batch = rows.batch
    return CHANGES.encode(
        len(rows),
        {
            "position": rows.positions,
            "ordinal": rows.ordinals,
            "sequence": batch.sequences,
            "time_ms": batch.log_times_ms,
            "headers": batch.headers,
            "payload": batch.payloads,
        },
    )
