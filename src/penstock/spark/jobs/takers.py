"""Which of several sinks take the rows of a fold, by their routes.

A row's takers are the bits of a number, one for each sink. They are told where a partition is
folded, because a route by operation or header needs all deltas that touched a vector; the rows may
then go anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.spark.delivery.selection import SinkRoutes

_JUDGED: Final = ["topic", "namespace", "vector_id", "op", "headers"]


class Takers:
    """Which sinks take the rows of a fold, as the bits of a number."""

    def __init__(self, routes: Sequence[Sequence[str]]) -> None:
        self._routes = [SinkRoutes.parse(one) for one in routes]
        # Routes by operation or header take the vectors that a matching delta has touched.
        self._touching: dict[int, pa.Table] = {}

    def of_deltas(self, deltas: pa.Table) -> NDArray[np.int64]:
        found = np.zeros(deltas.num_rows, np.int64)
        for number, routes in enumerate(self._routes):
            taken = routes.deltas(_numbered(deltas))
            found[taken["row"].to_numpy()] |= _bit(number)
            if routes.judge_states_by_deltas:
                self._touch(number, taken)
        return found

    def of_states(self, states: pa.Table) -> NDArray[np.int64]:
        found = np.zeros(states.num_rows, np.int64)
        for number, routes in enumerate(self._routes):
            taken = routes.states(_numbered(states), self._touching.get(number))
            found[taken["row"].to_numpy()] |= _bit(number)
        return found

    def _touch(self, number: int, taken: pa.Table) -> None:
        known, rows = self._touching.get(number), taken.select(_JUDGED)
        both = rows if known is None else pa.concat_tables([known, rows])
        self._touching[number] = both.group_by(_JUDGED).aggregate([]).select(_JUDGED)


def _numbered(table: pa.Table) -> pa.Table:
    return table.append_column("row", pa.array(np.arange(table.num_rows)))


def _bit(number: int) -> np.int64:
    return np.int64(1) << np.int64(number)


def taken_by(takers: NDArray[np.int64], number: int) -> NDArray[np.bool_]:
    """Which rows the sink of this number takes."""
    return np.asarray((takers >> np.int64(number)) & 1 == 1)
