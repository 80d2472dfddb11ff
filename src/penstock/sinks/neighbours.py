"""Asking for the vectors near another: what every nearest-neighbour index takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import InvalidArgument, SinkRejected
from penstock.model.delta import DIMENSIONS_MAX
from penstock.sinks.schema import newest, vector_keys

Metric = Literal["cosine", "l2", "dot"]
METRICS: Final = get_args(Metric)
NEIGHBOURS_MAX: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A vector near the one that was asked about; `distance` is smaller the nearer it is."""

    namespace: str
    vector_id: str
    distance: float
    revision: int
    metadata: dict[str, Any] | None


def check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise InvalidArgument(f"metric must be one of {METRICS}", field="metric", limit=METRICS)


def checked_query(
    vector: Sequence[float] | NDArray[np.floating[Any]], k: int, metric: str
) -> NDArray[np.float32]:
    """The vector that is asked about, or a refusal that names what is wrong with the question."""
    try:
        query = np.asarray(vector, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidArgument("a vector is a row of numbers", field="vector") from error
    if query.ndim != 1 or not 1 <= len(query) <= DIMENSIONS_MAX:
        raise InvalidArgument(
            f"a vector has 1 to {DIMENSIONS_MAX} numbers", field="vector", limit=DIMENSIONS_MAX
        )
    if not np.isfinite(query).all():
        raise InvalidArgument("a vector's numbers must be finite", field="vector")
    check_metric(metric)
    if metric == "cosine" and not query.any():
        raise InvalidArgument("a vector of zeros has no direction", field="vector")
    if not 1 <= k <= NEIGHBOURS_MAX:
        raise InvalidArgument(
            f"k is {k}, must be from 1 to {NEIGHBOURS_MAX}", field="k", limit=NEIGHBOURS_MAX
        )
    return query


def values_of(column: pa.ChunkedArray) -> NDArray[np.float32]:
    """A column of vectors, which must be in one piece, as a matrix; nothing is copied."""
    (chunk,) = column.chunks
    flat: NDArray[np.float32] = chunk.flatten().to_numpy()
    return flat.reshape(len(chunk), chunk.type.list_size)


def searchable(states: pa.Table) -> tuple[pa.Table, list[int]]:
    """The newest state of each vector, and the numbers of the rows whose distance to others cannot
    be told; deleted ones have none to tell."""
    states = states.combine_chunks()
    total = values_of(states["vector"]).sum(axis=1, dtype=np.float64)
    finite = np.isfinite(total) | states["deleted"].to_numpy()
    chosen = newest(vector_keys(states), states["revision"].to_numpy()) & finite
    if not chosen.all():
        states = states.filter(pa.array(chosen))
    return states, np.flatnonzero(~finite).tolist()


def refuse(rows: list[int]) -> None:
    """Report rows that no index can take, after the others were written."""
    if rows:
        raise SinkRejected("a component is not finite: no distance to it can be told", rows=rows)
