"""A history of deltas held against what one log partition released: each of them once, unchanged.

Both sides are DELTAS tables of one partition. Released deltas are numbered (`ordinal`), so a row's
place is known, and a row that is missing, there twice or beyond the end is seen by counting.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.sinks.schema import DELTAS
from penstock.spark.jobs.differences import Comparison

COMPARED: Final = [name for name in DELTAS.names if name != "payload"]
_SHOWN: Final = ("topic", "partition", "ordinal", "sequence", "namespace", "vector_id")


def compare_history(expected: pa.Table, actual: pa.Table, found: Comparison) -> None:
    """Add what differs between the two to `found`. `expected` is in the order of release."""
    actual = _like(actual.select(COMPARED))
    found.expected += expected.num_rows
    found.compared += actual.num_rows
    rows = _rows(expected["ordinal"].to_numpy(), actual["ordinal"].to_numpy())
    strays = np.flatnonzero(rows < 0)
    found.differ("extra", (_shown(actual, row) for row in strays), len(strays), "ahead")
    times = np.bincount(rows[rows >= 0], minlength=expected.num_rows)
    missing = np.flatnonzero(times == 0)
    found.differ("missing", (_shown(expected, row) for row in missing), len(missing), "behind")
    repeated = np.flatnonzero(times > 1)
    found.differ("twice", (_shown(expected, row) for row in repeated), len(repeated))
    known = rows >= 0
    _compare_rows(expected, rows[known], actual.filter(pa.array(known)), found)


def _rows(expected: NDArray[np.int64], actual: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each number stands among the expected ones, which ascend; -1: nowhere."""
    rows = np.searchsorted(expected, actual)
    rows[rows == len(expected)] = -1
    rows[(rows >= 0) & (expected[rows] != actual)] = -1
    return rows


def _compare_rows(
    expected: pa.Table, rows: NDArray[np.int64], actual: pa.Table, found: Comparison
) -> None:
    """Every row against the released delta of its number, column by column."""
    wanted = expected.select(COMPARED)
    if not np.array_equal(rows, np.arange(wanted.num_rows)):
        wanted = wanted.take(pa.array(rows))
    for name in COMPARED:
        unequal = np.flatnonzero(_unequal(actual[name], wanted[name]))
        places = (_shown(actual, row) for row in unequal)
        found.differ(f"column {name}", places, len(unequal))


def _like(table: pa.Table) -> pa.Table:
    """With the types of DELTAS: a lake has fewer of them."""
    schema = pa.schema([DELTAS.field(name).with_nullable(True) for name in COMPARED])
    return table.cast(schema)


def _unequal(actual: pa.ChunkedArray, wanted: pa.ChunkedArray) -> NDArray[np.bool_]:
    if pa.types.is_list(actual.type):
        return _unequal_lists(actual.combine_chunks(), wanted.combine_chunks())
    nulls = pc.xor(actual.is_null(), wanted.is_null())
    other = pc.fill_null(pc.not_equal(actual, wanted), False)
    return np.asarray(pc.or_(nulls, other).to_numpy())


def _unequal_lists(actual: Any, wanted: Any) -> NDArray[np.bool_]:
    """Lists of numbers by their bits; null and empty are the same."""
    sizes = [pc.fill_null(pc.list_value_length(side), 0).to_numpy() for side in (actual, wanted)]
    unequal: NDArray[np.bool_] = sizes[0] != sizes[1]
    same = ~unequal
    if unequal.any():
        actual, wanted = (side.filter(pa.array(same)) for side in (actual, wanted))
    left, right = (_bits(side.flatten()) for side in (actual, wanted))
    owner = np.repeat(np.flatnonzero(same), sizes[0][same])
    unequal[owner[left != right]] = True
    return unequal


def _bits(values: Any) -> NDArray[Any]:
    numbers = values.to_numpy(zero_copy_only=False)
    return np.asarray(numbers.view(f"u{numbers.dtype.itemsize}"))


def _shown(table: pa.Table, row: Any) -> dict[str, Any]:
    return {name: table[name][int(row)].as_py() for name in _SHOWN}
