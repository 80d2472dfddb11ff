"""Arrow arrays over numpy memory, without a copy where the layouts agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def fixed(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """A column of fixed width; `values` may differ from `kind` in sign only, not in width."""
    flat = np.ascontiguousarray(values)
    if flat.dtype.itemsize * 8 != kind.bit_width:
        flat = flat.astype(kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])


def same(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), count)


def bits(values: NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def vectors(values: NDArray[np.float32]) -> pa.Array:
    count, dimensions = values.shape
    flat = fixed(values.reshape(count * dimensions), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, dimensions)


def ids(values: NDArray[np.uint8], *, valid: NDArray[np.bool_] | None = None) -> pa.Array:
    count, width = values.shape
    mask = None if valid is None else bits(valid)
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.binary(width), count, [mask, data])


def sixteen(pairs: NDArray[np.uint64]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(pairs).view(np.uint8).reshape(len(pairs), 16)


def names(pairs: NDArray[np.uint64]) -> pa.Array:
    """Rows of two numbers as the text that their sixteen bytes hold, padded with zeros."""
    letters = sixteen(pairs)
    return ragged(*masked(letters, letters != 0), pa.utf8())


def ragged(
    offsets: NDArray[Any], blob: Any, kind: pa.DataType, *, empty_is_null: bool = False
) -> pa.Array:
    """A column of strings or bytes from offsets into a blob, which is not copied."""
    narrow = np.ascontiguousarray(offsets, np.int32)
    mask = bits(np.diff(narrow) > 0) if empty_is_null else None
    data = [mask, pa.py_buffer(narrow), pa.py_buffer(blob)]
    return pa.Array.from_buffers(kind, len(narrow) - 1, data)


def lists(offsets: NDArray[Any], values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    narrow = pa.array(np.ascontiguousarray(offsets, np.int32))
    return pa.ListArray.from_arrays(narrow, fixed(values, kind))


def sliced(
    blob: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The pieces of `blob` one behind the other, and where each begins."""
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    at = np.repeat(starts - offsets[:-1], lengths)
    at += np.arange(len(at))
    return offsets, blob[at]


def masked(
    matrix: NDArray[np.uint8], mask: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The chosen bytes of each row one behind the other, and where each row begins."""
    offsets = np.zeros(len(matrix) + 1, np.int64)
    np.cumsum(mask.sum(axis=1), out=offsets[1:])
    return offsets, matrix[mask]
