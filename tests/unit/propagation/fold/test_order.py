"""The order of columns and the order of single deltas agree."""

import numpy as np
import pytest
from tests.unit.propagation.world import DIMENSIONS, World, batch_of, run

from penstock.model.delta import Delta, Op
from penstock.propagation.fold.propagator import Propagator


def sparse(world: World, origin: str) -> Delta:
    one = np.array([0], np.uint16)
    return world.write(origin, "v", Op.SPARSE, tick=1, indices=one, values=one.astype(np.float32))


@pytest.mark.parametrize("late", ["b", "c", "d"])
def test_one_cause_of_several_is_waited_for_wherever_the_clock_names_it(late: str) -> None:
    world = World()
    causes = {origin: sparse(world, origin) for origin in "bcd"}
    for origin in "bcd":
        world.show(origin, "a", "v")
    world.heads["a", "v"] = next(d.delta_id for origin, d in causes.items() if origin != late)
    effect = sparse(world, "a")
    early = [delta for origin, delta in causes.items() if origin != late]
    log = batch_of([*early, effect, causes[late]])
    fold = Propagator(DIMENSIONS)
    outcomes = run(fold, log, [0, 1, 2, 3, 4])
    released = [id_ for outcome in outcomes for id_ in outcome.released.delta_ids()]
    assert released == [d.delta_id for d in (*early, causes[late], effect)]
