"""The state of a partition between Spark's Python workers, whichever of them gets a task."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from pyspark.sql import SparkSession
from tests.spark.conftest import RunningNode
from tests.spark.fold_task_child import fold
from tests.spark.folding import delta, delta_topic, put_payloads
from tests.unit.propagation.world import DIMENSIONS, Luck, batch_of, run

from penstock.model.delta import Op
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.snapshot import digest
from penstock.propagation.options import PropagationOptions
from penstock.spark.fold.local_state import executor_folder, local_state
from penstock.spark.fold.partition_step import STATES
from penstock.spark.source.ranges import FoldRange

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


def two_workers(spark: SparkSession) -> None:
    assert len(set(spark.sparkContext.parallelize(range(2), 2).map(worker).collect())) == 2


def test_every_worker_of_an_executor_finds_the_state(spark: SparkSession) -> None:
    context, pipeline = spark.sparkContext, uuid.uuid4().hex
    two_workers(spark)
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


def test_every_worker_goes_on_with_the_feed_of_a_query(
    spark: SparkSession, node: RunningNode
) -> None:
    delta_topic(node, dimensions=4)
    given = {"url": node.url, "topic": "vectors", "mode": "vectors"}
    owner, read, pids = f"{uuid.uuid4()}-vectors", 0, set[int]()
    two_workers(spark)
    for number in range(1, STEPS):
        put_payloads(node, [delta(number, "v", Op.CREATE if number == 1 else Op.SPARSE)], at=number)
        (status,) = node.access().log_status("vectors")
        part = FoldRange("vectors", 0, read + 1, status.readable, status.topic_id)

        job = spark.sparkContext.parallelize([part], 1)
        ((pid, told),) = job.map(lambda part: (os.getpid(), fold(given, part, owner))).collect()

        assert told["ranges"] == [(part.first, part.last)]
        assert told["rows"] == [["v", "insert" if number == 1 else "update_postimage"]]
        pids.add(pid)
        read = part.last
    assert len(pids) > 1, "Spark has given every task to one worker"


def test_a_query_leaves_its_state_with_the_executor(
    spark: SparkSession, node: RunningNode, tmp_path: Path
) -> None:
    delta_topic(node, dimensions=4)
    put_payloads(node, [delta(1, "v", Op.CREATE)])
    (status,) = node.access().log_status("vectors")
    options = {"url": node.url, "topic": "vectors", "mode": "released"}
    writer = spark.readStream.format("penstock").options(**options).load().writeStream
    query = (
        writer.foreachBatch(lambda batch, _: batch.collect())
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    key = (f"{query.id}-released", str(status.topic_id), 0)

    (root,) = spark.sparkContext.parallelize([key], 1).map(executor_folder).collect()

    assert root is not None and root.parent.name.startswith("blockmgr-")
    assert (root / key[0] / f"{status.topic_id}-0" / "facts").exists()
