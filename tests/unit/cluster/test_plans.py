import pytest

from penstock.cluster.placement import Move
from penstock.cluster.plans import MOVES_MAX, PLAN, Plans
from penstock.cluster.store import VALUE_BYTES_MAX, MetadataStore
from penstock.errors import Corruption

ONE, TWO, THREE = (Move(1, partition, ("a", "b")) for partition in range(3))


async def test_moves_wait_in_order_until_they_begin(either_store: MetadataStore) -> None:
    plans = Plans(either_store)
    assert await plans.waiting() == []
    await plans.replace([ONE, TWO, THREE])
    await plans.begun(TWO)
    assert await plans.waiting() == [ONE, THREE]
    await plans.begun(ONE)
    await plans.begun(THREE)
    assert await plans.waiting() == [] and await either_store.get(PLAN) is None


async def test_a_later_plan_takes_the_place_of_an_earlier_one(either_store: MetadataStore) -> None:
    plans = Plans(either_store)
    await plans.replace([ONE, TWO])
    await plans.replace([THREE])
    await plans.begun(ONE)  # by a node that has not heard of the later one
    await plans.begun(Move(THREE.topic, THREE.partition, ("b", "a")))
    assert await plans.waiting() == [THREE]
    await plans.replace([])
    assert await plans.waiting() == []


async def test_the_longest_plan_fits(either_store: MetadataStore) -> None:
    longest = tuple(f"{number}{'n' * 63}" for number in range(5))
    moves = [Move(2**31, partition, longest) for partition in range(MOVES_MAX)]
    await Plans(either_store).replace(moves)
    entry = await either_store.get(PLAN)
    assert entry is not None and len(entry.value) <= VALUE_BYTES_MAX
    assert await Plans(either_store).waiting() == moves


async def test_a_plan_that_cannot_be_read_is_said_so(either_store: MetadataStore) -> None:
    await either_store.put(PLAN, b"{")
    with pytest.raises(Corruption, match="cluster/plan"):
        await Plans(either_store).waiting()
