import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.propagation.fold.merge import ascending

rows = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=30)


@given(rows, st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_times_ascend_within_a_chain(pairs: list[tuple[int, int]], last: list[int]) -> None:
    chains = np.array([chain for chain, _ in pairs], np.int64)
    times = np.array([time for _, time in pairs], np.int64)
    kept, expected = np.array(last, np.int64), []
    for chain, time in pairs:
        last[chain] = max(time, last[chain] + 1)
        expected.append(last[chain])
    assert ascending(times, chains, kept).tolist() == expected
    assert kept.tolist() == last
