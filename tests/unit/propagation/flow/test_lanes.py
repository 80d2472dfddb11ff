import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.propagation.flow.lanes import Lanes


@pytest.mark.parametrize(
    ("waits", "lane"),
    [
        ([0, 0, 0, 0], 0),
        ([None, None, 0, 0], 2),
        ([0, None, None, 29_999], 0),
        ([0, None, None, 30_001], 3),
        ([0, None, None, 30_000], 0),  # equal ranks: the more urgent
        ([5_000, 20_000, None, None], 1),
        ([-50, None, None, 0], 0),
    ],
)
def test_age_counts_against_class(waits: list[float | None], lane: int) -> None:
    assert Lanes().choose(waits) == lane


def test_ageing_is_an_option() -> None:
    assert Lanes(ageing_ms=100).choose([0, None, None, 301]) == 3
    with pytest.raises(InvalidArgument):
        Lanes(ageing_ms=0)


@pytest.mark.parametrize("waits", [[None] * 4, [0] * 3])
def test_there_is_something_to_choose_from(waits: list) -> None:
    with pytest.raises(InvalidArgument):
        Lanes().choose(waits)


@given(st.lists(st.none() | st.integers(0, 50_000), min_size=4, max_size=4))
def test_who_is_due_does_not_depend_on_the_present(waits: list[int | None]) -> None:
    lanes = Lanes()
    full = [lane for lane, wait_ms in enumerate(waits) if wait_ms is not None]
    if full:
        first = min(full, key=lambda lane: lanes.due(lane, 70_000 - (waits[lane] or 0)))
        assert first == lanes.choose(waits)
