import numpy as np
import pytest

from penstock.heap.table import KEY_MAX, Ordering
from penstock.model.topic import Mode, TopicConfig

LEAST = -(1 << 63)


def ordering(**changes: object) -> Ordering:
    return Ordering(TopicConfig(name="t", **changes))  # type: ignore[arg-type]


def test_min_orders_by_priority() -> None:
    assert ordering().keys(np.array([LEAST, 0, KEY_MAX])).tolist() == [LEAST, 0, KEY_MAX]


def test_max_reverses_without_overflow() -> None:
    reverse = ordering(mode=Mode.MAX)
    keys = reverse.keys(np.array([LEAST, 0, KEY_MAX]))
    assert keys.tolist() == [KEY_MAX, -1, LEAST]
    assert reverse.keys(keys).tolist() == [LEAST, 0, KEY_MAX]
    assert [reverse.key_one(p, 0) for p in (LEAST, KEY_MAX)] == [(KEY_MAX, KEY_MAX), (LEAST, LEAST)]


def test_waiting_makes_up_for_priority() -> None:
    ageing = ordering(ageing_per_s=10)
    old, new = ageing.aged(np.array([50, 0]), np.array([0, 5_100])).tolist()
    assert old == 50
    assert new == 51


@pytest.mark.parametrize("rate", [1, 7, 10**9])
@pytest.mark.parametrize("time_ms", [0, 999, 1_700_000_000_123])
def test_one_key_ages_as_many(rate: int, time_ms: int) -> None:
    ageing = ordering(ageing_per_s=rate)
    keys = np.array([LEAST, -5, 0, KEY_MAX - 1, KEY_MAX])
    expected = [min(KEY_MAX, int(k) + rate * time_ms // 1000) for k in keys]
    assert ageing.aged(keys, np.full(5, time_ms)).tolist() == expected
    assert ageing.aged(keys, time_ms).tolist() == expected
    assert [ageing.key_one(int(k), time_ms)[1] for k in keys] == expected
