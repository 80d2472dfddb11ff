"""Arrow arrays over numpy memory."""

import numpy as np
import pyarrow as pa

from penstock.sinks import arrays


def test_fixed_columns_share_their_memory() -> None:
    numbers = np.array([1, 2, 3], np.uint64)
    column = arrays.fixed(numbers, pa.int64())
    assert column.type == pa.int64()
    numbers[0] = 7
    assert column.to_pylist() == [7, 2, 3]


def test_a_column_of_another_width_is_converted() -> None:
    assert arrays.fixed(np.array([1, 2], np.uint8), pa.int64()).to_pylist() == [1, 2]


def test_ragged_columns_take_offsets_that_do_not_start_at_zero() -> None:
    offsets = np.array([2, 4, 4, 7], np.int64)
    column = arrays.ragged(offsets, b"xxabcde", pa.utf8())
    assert column.to_pylist() == ["ab", "", "cde"]
    assert arrays.ragged(offsets, b"xxabcde", pa.binary(), empty_is_null=True).null_count == 1


def test_pieces_of_a_blob_are_put_one_behind_the_other() -> None:
    blob = np.frombuffer(b"hello world", np.uint8)
    offsets, data = arrays.sliced(blob, np.array([6, 0, 3]), np.array([5, 0, 2]))
    assert offsets.tolist() == [0, 5, 5, 7]
    assert data.tobytes() == b"worldlo"


def test_chosen_bytes_of_rows() -> None:
    matrix = np.frombuffer(b"abcdef", np.uint8).reshape(2, 3)
    mask = np.array([[True, False, True], [False, True, False]])
    offsets, data = arrays.masked(matrix, mask)
    assert (offsets.tolist(), data.tobytes()) == ([0, 2, 3], b"ace")


def test_ids() -> None:
    ids = np.arange(32, dtype=np.uint8).reshape(2, 16)
    found = arrays.ids(ids, valid=np.array([False, True]))
    assert found.to_pylist() == [None, bytes(range(16, 32))]
