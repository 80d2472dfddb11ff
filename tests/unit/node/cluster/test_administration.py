"""Which moves begin, with a real metadata store and no nodes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.cluster.embedded import EmbeddedStore
from penstock.cluster.placement import Move, Plans, Records
from penstock.node.cluster.administration import MOVE_S_MAX, Mover
from penstock.replication.assignment import PartitionRecord

HERE, THERE = ("a", "b"), ("b", "c")
MOVES = [Move(1, partition, THERE) for partition in range(4)]


@pytest.fixture
async def cluster(tmp_path: Path) -> Any:
    store = EmbeddedStore(tmp_path / "meta")
    records, plans = Records(store), Plans(store)
    await records.ensure({(1, partition): PartitionRecord(voters=HERE) for partition in range(5)})
    await plans.replace(MOVES)
    options = SimpleNamespace(moves_max=2)
    return SimpleNamespace(records=records, plans=plans, options=options, is_oldest=True)


async def begun(cluster: Any) -> list[int]:
    """Partitions that were told where to go."""
    return [key[1] for key, record in (await cluster.records.list()).items() if record.target]


async def arrive(cluster: Any, partition: int) -> None:
    held, revision = await cluster.records.get((1, partition))
    there = msgspec.structs.replace(held, voters=held.target, target=())
    await cluster.records.change((1, partition), there, revision)


async def test_so_many_move_at_a_time_whoever_looks(cluster: Any) -> None:
    assert await Mover(cast(Any, cluster)).look(0.0)
    assert await begun(cluster) == [0, 1]
    assert await cluster.plans.waiting() == MOVES[2:]
    assert await Mover(cast(Any, cluster)).look(0.0)  # another node goes on
    assert await begun(cluster) == [0, 1]
    await arrive(cluster, 0)
    await Mover(cast(Any, cluster)).look(0.0)
    assert await begun(cluster) == [1, 2]
    await arrive(cluster, 1)
    await arrive(cluster, 2)
    await Mover(cast(Any, cluster)).look(0.0)
    assert await begun(cluster) == [3]
    assert not await Mover(cast(Any, cluster)).look(0.0)


async def test_a_partition_that_changes_for_another_reason_takes_a_place(cluster: Any) -> None:
    held, revision = await cluster.records.get((1, 4))
    joint = msgspec.structs.replace(held, joint=THERE)
    await cluster.records.change((1, 4), joint, revision)
    await Mover(cast(Any, cluster)).look(0.0)
    assert await begun(cluster) == [0]


async def test_a_move_that_takes_too_long_gives_its_place_away(cluster: Any) -> None:
    moving = Mover(cast(Any, cluster))
    await moving.look(0.0)
    await moving.look(1.0)  # seen on the move
    await moving.look(MOVE_S_MAX)
    assert await begun(cluster) == [0, 1]
    await moving.look(MOVE_S_MAX + 1.0)
    assert await begun(cluster) == [0, 1, 2, 3], "and goes on"


async def test_what_is_gone_is_not_waited_for(cluster: Any) -> None:
    await cluster.plans.replace([Move(9, 0, THERE), *MOVES[:1]])
    await Mover(cast(Any, cluster)).look(0.0)
    assert await begun(cluster) == [0]
    assert await cluster.plans.waiting() == []
