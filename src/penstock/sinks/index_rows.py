"""The vectors of a STATES table, as an index looks at them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def values_of(column: pa.ChunkedArray) -> NDArray[np.float32]:
    """A column of vectors, which must be in one piece, as a matrix; nothing is copied."""
    (chunk,) = column.chunks
    flat: NDArray[np.float32] = chunk.flatten().to_numpy()
    return flat.reshape(len(chunk), chunk.type.list_size)


def finite_rows(states: pa.Table) -> NDArray[np.bool_]:
    """Rows whose distance to others can be told; deleted ones have none to tell."""
    values = values_of(states["vector"])
    deleted: NDArray[np.bool_] = states["deleted"].to_numpy()
    return np.asarray(np.isfinite(values.sum(axis=1, dtype=np.float64)) | deleted)
