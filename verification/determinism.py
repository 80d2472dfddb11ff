"""One log taken to a lake by three ways: one trigger, many small triggers, the batch job.

What the deltas add up to is a function of the log alone, so all three give the same vectors, bit
for bit, and both pipelines the same history: the same deltas in the same order of release.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.demo.corpus import Chunk, Corpus, CorpusOptions, generate
from penstock.sinks.lake import LakeSink
from penstock.sinks.protocol import Items
from penstock.spark.jobs.comparison import Comparison, compare
from penstock.spark.jobs.digests import COMPARED, EXPECTED, HELD, delta_digests, state_digests
from penstock.spark.jobs.materialise import materialise
from penstock.spark.pipeline import Pipeline
from penstock.spark.settings import PipelineSettings
from penstock.spark.source.access import NodeTopicWriter
from penstock.spark.source.options import Connecting

TOPIC: Final = "vectors"
PARTITIONS: Final = 2
PUT_ROWS: Final = 10_000
ONE_TRIGGER: Final = 1 << 30  # rows: more than there are


def fill_topic(
    node: Connecting, corpus: Corpus, *, topic: str = TOPIC, partitions: int = PARTITIONS
) -> None:
    """A delta topic with every arrival of the corpus, in order."""
    access = node.access()
    config = {
        "name": topic,
        "kind": "delta",
        "dimensions": corpus.options.dimensions,
        "partitions": partitions,
    }
    access.call("topic_create", config=config, exists_ok=True)
    writer, first = NodeTopicWriter(lambda: access), 1
    for chunk in corpus.chunks(PUT_ROWS):
        items = items_of(chunk, first=first)
        writer.append(topic, producer="corpus", epoch=1, items=items, partition=0)
        first += len(chunk)


def items_of(chunk: Chunk, *, first: int) -> Items:
    """A chunk's arrivals as messages, numbered from `first` on."""
    payloads = chunk.payloads
    buffers = [None, pa.py_buffer(payloads.offsets), pa.py_buffer(payloads.blob)]
    return Items(
        sequences=np.arange(first, first + len(chunk), dtype=np.int64),
        payloads=pa.Array.from_buffers(pa.binary(), len(chunk), buffers),
        priorities=chunk.priorities.astype(np.int64),
    )


class Ways:
    def __init__(self, spark: Any, url: str, folder: Path, options: CorpusOptions) -> None:
        self._spark, self._node, self._folder = spark, Connecting(url=url), folder
        self._corpus = generate(options)
        self.seconds: dict[str, float] = {}

    def compare(self, *, trigger_rows: int) -> dict[str, Any]:
        """Go all three ways, and say what differs; nothing does."""
        self._timed("fill", lambda: fill_topic(self._node, self._corpus))
        self._timed("one", lambda: self._run("one", ONE_TRIGGER))
        self._timed("small", lambda: self._run("small", trigger_rows))
        made = self._folder / "batch"
        batch = self._timed("batch", lambda: materialise(self._spark, self._node, [TOPIC], made))
        expected = state_digests(_states(pq.read_table(made)), EXPECTED)
        lakes = {name: self._lake(name) for name in ("one", "small")}
        parts = {name: _compare_vectors(expected, lake) for name, lake in lakes.items()}
        parts["history"] = _compare_histories(lakes["one"], lakes["small"])
        return {
            "corpus": self._corpus.facts,
            "vectors": batch["vectors"],
            "released": sum(partition["released"] for partition in batch["partitions"]),
            "quarantined": sum(partition["quarantined"] for partition in batch["partitions"]),
            "triggers": {name: self._triggers(name) for name in lakes},
            "different": {name: part.to_dict() for name, part in parts.items() if part.wrong()},
            "seconds": self.seconds,
        }

    def _timed(self, name: str, work: Any) -> Any:
        began = time.perf_counter()
        found = work()
        self.seconds[name] = round(time.perf_counter() - began, 1)
        return found

    def _run(self, name: str, rows: int) -> None:
        """A pipeline of its own over the whole log, with so many rows to a trigger."""
        tree = {
            "name": name,
            "url": self._node.url,
            "topics": [TOPIC],
            "state": str(self._folder / f"state-{name}"),
            "rows_per_trigger": {"min": rows, "max": rows, "initial": rows},
            "sink": [{"kind": "lake", "path": str(self._folder / name)}],
        }
        Pipeline(PipelineSettings.of(tree), session=self._spark).run(available_now=True)

    def _lake(self, name: str) -> LakeSink:
        lake = LakeSink(name, path=str(self._folder / name))
        lake.open()
        return lake

    def _triggers(self, name: str) -> int:
        """How many triggers it took; the newest manifest always stays."""
        manifests = (self._folder / f"state-{name}" / "changes").glob("*.json")
        return 1 + max(int(path.stem) for path in manifests)


def _states(table: pa.Table) -> pa.Table:
    return table.append_column("deleted", pa.repeat(pa.scalar(False), table.num_rows))


def _compare_vectors(expected: pa.Table, lake: LakeSink) -> Comparison:
    held = [state_digests(batch, HELD) for batch in lake.scan()]
    return compare(pa.concat_tables([expected, *held]), kind="vectors")


def _compare_histories(one: LakeSink, other: LakeSink) -> Comparison:
    sides = ((one, EXPECTED), (other, HELD))
    return compare(
        pa.concat_tables(
            delta_digests(batch, side)
            for lake, side in sides
            for batch in lake.history.batches(COMPARED)
        ),
        kind="history",
    )
