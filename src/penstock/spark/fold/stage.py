"""The stateful stage: Spark's part in folding.

    ranges (slot, topic, partition, first, last) ─► task of the slot ─► part (JSON)

Spark groups the trigger's ranges by slot, hands each slot's head to a Python worker, keeps the head
that comes back with the trigger's state, and brings the parts to the driver. Rows never pass
through Spark: the worker reads the range from the node itself, and the part names a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pandas as pd
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit
from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessor,
    StatefulProcessorHandle,
)

from penstock.errors import Corruption
from penstock.spark.fold.changes import ChangePart
from penstock.spark.fold.partition_step import FoldHead, FoldPlan, PartitionStep
from penstock.spark.fold.state_folder import CANDIDATES_PER_TASK, PipelineIdentity
from penstock.spark.source.ranges import ReadRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

HEAD: Final = "head string"
PART: Final = "part string"


class FoldProcessor(StatefulProcessor):
    """Folds the range of a slot. Pickled to the workers, so it holds nothing but the plan."""

    def __init__(self, plan: FoldPlan) -> None:
        self._plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._head = handle.getValueState("head", HEAD)

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        ranges = sorted(_ranges(rows), key=lambda found: found.first)
        stored = self._head.get()
        head = None if stored is None else msgspec.json.decode(stored[0], type=FoldHead)
        parts = []
        for found in ranges:
            head, part = PartitionStep(self._plan, found).run(head)
            parts.append(msgspec.json.encode(part).decode())
        if head is not None:
            self._head.update((msgspec.json.encode(head).decode(),))
        yield pd.DataFrame({"part": parts})

    def close(self) -> None:
        return


def _ranges(rows: Iterator[pd.DataFrame]) -> Iterator[ReadRange]:
    for frame in rows:
        columns = (frame[name].tolist() for name in ("topic", "partition", "first", "last"))
        for topic, partition, first, last in zip(*columns, strict=True):
            yield ReadRange(topic, int(partition), int(first), int(last))


def folded(ranges: DataFrame, *, identity: PipelineIdentity, plan: FoldPlan) -> DataFrame:
    """The stage over a stream of ranges."""
    slots = F.create_map(
        *(
            F.lit(value)
            for topic, known in identity.topics.items()
            for partition, slot in enumerate(known.slots)
            for value in (f"{topic}/{partition}", slot)
        )
    )
    place = F.concat(F.col("topic"), F.lit("/"), F.col("partition").cast("string"))
    slotted = ranges.select(
        slots[place].cast("int").alias("slot"),
        "topic",
        "partition",
        F.col("from").alias("first"),  # `from` is no name that a Python row could have
        F.col("to").alias("last"),
    )
    return slotted.groupBy("slot").transformWithStateInPandas(
        statefulProcessor=FoldProcessor(plan),
        outputStructType=PART,
        outputMode="Append",
        timeMode="None",
    )


def parts_of(rows: list[Row]) -> list[ChangePart]:
    """What the tasks of a trigger returned; one part per partition."""
    parts = [msgspec.json.decode(row["part"], type=ChangePart) for row in rows]
    if len({(part.topic, part.partition) for part in parts}) != len(parts):
        raise Corruption("a trigger holds two ranges of one partition")
    return parts


def slot_candidates(spark: SparkSession, *, tasks: int, wanted: int) -> list[tuple[int, int]]:
    """Integers, each with the task that Spark sends it to. Enough of them for `wanted` slots."""
    count = CANDIDATES_PER_TASK * (tasks + wanted)
    numbers = spark.range(count).select(F.col("id").cast("int").alias("slot"))
    rows = numbers.select("slot", F.expr(f"pmod(hash(slot), {tasks})").alias("task")).collect()
    return [(row["slot"], row["task"]) for row in rows]
