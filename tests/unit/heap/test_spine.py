import numpy as np
import pytest

from penstock.heap.spine import Spine


class Source:
    """A partition that notes how many candidates it was asked for."""

    cut = False

    def __init__(self, *keys: int) -> None:
        self.keys = np.array(sorted(keys), np.int64)
        self.asked: list[int] = []

    def candidates(self, n: int, now: int) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(n)
        return self.keys[:n], np.arange(1, len(self.keys) + 1, dtype=np.uint64)[:n]

    def rank(self, key: int, sequence: int, now: int) -> int:
        return int(np.count_nonzero(self.keys < key))


def picked(spine: Spine, sources: list[Source], n: int) -> dict[int, int]:
    return {p: len(messages) for p, messages in spine.pick(sources, n, 0)}


@pytest.mark.parametrize(("k", "partitions", "fan_out"), [(100, 1, 100), (100, 8, 13), (3, 8, 1)])
def test_the_fan_out_shares_k_among_the_partitions(k: int, partitions: int, fan_out: int) -> None:
    assert Spine(k, partitions).fan_out == fan_out


def test_without_partitions_there_is_nothing_to_pick() -> None:
    assert Spine(100, 6).pick([], 5, 0) == []


def test_a_used_up_list_is_refilled_before_it_is_passed() -> None:
    """All the best are in one partition: F candidates of each would return the wrong ones."""
    rich, poor = Source(*range(50)), Source(100, 101, 102)
    assert picked(Spine(4, 2), [rich, poor], 40) == {0: 40}
    assert len(rich.asked) > 1
    assert poor.asked == [20]


def test_no_more_candidates_are_asked_for_than_a_pop_needs() -> None:
    sources = [Source(*range(10, 200)), Source(*range(1, 200))]
    picked(Spine(100, 2), sources, 1)
    assert [source.asked for source in sources] == [[1], [1, 2]]


def test_equal_keys_are_taken_in_turn() -> None:
    sources = [Source(*[7] * 30) for _ in range(3)]
    assert picked(Spine(9, 3), sources, 9) == {0: 3, 1: 3, 2: 3}


def test_a_single_pop_does_not_favour_a_partition() -> None:
    spine, sources = Spine(100, 3), [Source(7), Source(7), Source(7)]
    assert {next(iter(picked(spine, sources, 1))) for _ in range(3)} == {0, 1, 2}


def test_nothing_ready_gives_nothing() -> None:
    spine = Spine(10, 2)
    assert spine.pick([Source(), Source()], 5, 0) == []
    assert spine.rank_error([Source(), Source()], [], 0) == 0


def test_the_rank_error_counts_better_messages_left_behind() -> None:
    sources = [Source(1, 2, 9), Source(5, 6)]
    best_of_second = [(1, np.array([1], np.uint64))]
    assert Spine(10, 2).rank_error(sources, best_of_second, 0) == 2


@pytest.mark.parametrize(("k", "partitions"), [(0, 1), (1, 0)])
def test_a_spine_needs_a_bound_and_partitions(k: int, partitions: int) -> None:
    with pytest.raises(ValueError):
        Spine(k, partitions)
