"""The state of a partition between Spark's Python workers, whichever of them gets a task."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from pyspark.sql import SparkSession
from tests.unit.propagation.world import DIMENSIONS, Luck, batch_of, run

from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.snapshot import digest
from penstock.propagation.options import PropagationOptions
from penstock.spark.fold.local_state import executor_folder, local_state
from penstock.spark.fold.partition_step import STATES

OPTIONS = PropagationOptions()
STEPS = 12
ROWS = 20


def worker(_: int) -> int:
    time.sleep(0.5)  # so that each task of a job needs a worker of its own
    return os.getpid()


def turn(pipeline: str, number: int) -> tuple[int, int, int, str]:
    """A step: who did it, where the state stood that was found, what it is now, where it lies."""
    key = (pipeline, "t", 0)
    root = executor_folder(key)
    log = batch_of(Luck(3).history(STEPS * ROWS))
    with local_state(key, OPTIONS, cache=STATES, root=root) as local:
        fold = local.found() or Propagator(DIMENSIONS, space=local.fresh_space())
        at = fold.sequence
        run(fold, log, [number * ROWS, (number + 1) * ROWS])
        local.settle(fold)
        return os.getpid(), at, digest(fold), str(root)


def test_every_worker_of_an_executor_finds_the_state(spark: SparkSession) -> None:
    context, pipeline = spark.sparkContext, uuid.uuid4().hex
    assert len(set(context.parallelize(range(2), 2).map(worker).collect())) == 2
    turns = []
    for number in range(STEPS):
        turns += context.parallelize([number], 1).map(lambda n: turn(pipeline, n)).collect()
    assert [at for _, at, _, _ in turns] == [number * ROWS for number in range(STEPS)]
    assert len({pid for pid, *_ in turns}) > 1, "Spark has given every task to one worker"
    alone = Propagator(DIMENSIONS)
    run(alone, batch_of(Luck(3).history(STEPS * ROWS)), [0, STEPS * ROWS])
    assert turns[-1][2] == digest(alone)
    root = Path(turns[-1][3])
    assert root.parent.name.startswith("blockmgr-") and (root / pipeline / "t-0" / "facts").exists()
