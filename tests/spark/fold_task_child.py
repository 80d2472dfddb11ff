"""A worker's task, in whatever process: `OPTIONS FIRST LAST TOPIC_ID OWNER` in one of its own.

It folds a range of the one partition of a topic, and tells which ranges of the log it has read for
that, and what came out.
"""

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import msgspec

from penstock.spark.frames.folded import FoldTask
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import ReadOptions
from penstock.spark.source.ranges import FoldRange


def fold(given: dict[str, str], part: FoldRange, owner: str) -> dict[str, Any]:
    ranges = list[tuple[int, int]]()
    real = NodeAccess.read_range

    def read_range(
        self: NodeAccess, topic: str, partition: int, first: int, last: int, **more: Any
    ) -> Iterator[Any]:
        ranges.append((first, last))
        return real(self, topic, partition, first, last, **more)

    options = ReadOptions.of(given)
    task = FoldTask(options, part, owner=owner)
    with patch.object(NodeAccess, "read_range", read_range):
        rows = released(task) if options.mode == "released" else changes(task)
    NodeAccess.close_shared()
    return {"ranges": ranges, "rows": rows}


def released(task: FoldTask) -> list[Any]:
    return [[int(n)] for rows in task.released() for n in rows.ordinals]


def changes(task: FoldTask) -> list[Any]:
    states, kinds, news = task.changes()
    told = zip(states.vector_id, kinds.tolist(), news.tolist(), strict=True)
    return [[id_.decode(), kind] for id_, kind, new in told if new]


def main(given: str, first: str, last: str, topic_id: str, owner: str) -> None:
    options = msgspec.json.decode(given, type=dict[str, str])
    part = FoldRange(options["topic"], 0, int(first), int(last), int(topic_id))
    sys.stdout.buffer.write(msgspec.json.encode(fold(options, part, owner)))


if __name__ == "__main__":
    main(*sys.argv[1:])
