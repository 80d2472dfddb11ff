"""One sink against the fold of the log, by what the sink keeps: vectors, a history, messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import NotFound
from penstock.sinks.lake import LakeSink
from penstock.sinks.letters import dead_letter_topic
from penstock.sinks.schema import DELTAS
from penstock.spark.delivery.delivery import Attached
from penstock.spark.delivery.routes import Routes
from penstock.spark.fold.log_deltas import read_deltas
from penstock.spark.jobs.differences import Comparison
from penstock.spark.jobs.fold import PartitionFold, open_table
from penstock.spark.jobs.forwarded import Ids, compare_forwarded, delta_ids, notice_ids
from penstock.spark.jobs.history_diff import COMPARED, compare_history
from penstock.spark.jobs.states_diff import Expected, compare_states
from penstock.spark.settings import SinkSettings
from penstock.spark.source.access import NodeAccess
from penstock.spark.source.options import Connecting

_NO_HISTORY: Final = DELTAS.empty_table()
# Sinks that keep no vectors but pass deltas on: how the ids in their topic are read, its name.
_FORWARDING: Final[dict[str, tuple[Callable[[NodeAccess, str], Ids], str]]] = {
    "remote": (delta_ids, "{topic}"),
    "notify": (notice_ids, "{topic}-changes"),
}


@dataclass(frozen=True)
class Fold:
    """What the log adds up to: files of the fold's tasks."""

    folder: Path
    partitions: Sequence[PartitionFold]

    @cached_property
    def expected(self) -> Expected:
        """Every vector, for sinks that get them all."""
        return Expected([self.states(fold) for fold in self.partitions])

    def states(self, fold: PartitionFold) -> pa.Table:
        assert fold.states is not None
        return open_table(self.folder, fold.states)

    def released(self, fold: PartitionFold) -> pa.Table:
        assert fold.released is not None
        return open_table(self.folder, fold.released)


def compare_sink(
    fold: Fold, one: SinkSettings, attached: Attached, *, node: Connecting
) -> dict[str, Comparison]:
    """What of the sink differs from the fold, by part."""
    if one.kind in _FORWARDING:
        return {"messages": _compare_messages(fold, one, attached.routes, node)}
    parts = {"vectors": _compare_vectors(fold, one, attached, node)}
    if isinstance(attached.sink, LakeSink):
        parts["history"] = _compare_history(fold, attached.sink, attached.routes)
    return parts


def _compare_vectors(
    fold: Fold, one: SinkSettings, attached: Attached, node: Connecting
) -> Comparison:
    expected = fold.expected
    if one.route:
        expected = Expected([_routed(fold, part, attached.routes) for part in fold.partitions])
    dead = expected.among(_refused(fold, one, node))
    return compare_states(expected, attached.sink.scan(), dead=dead)


def _routed(fold: Fold, partition: PartitionFold, routes: Routes) -> pa.Table:
    touching = fold.released(partition) if routes.judge_states_by_deltas else None
    return routes.states(fold.states(partition), touching)


def _refused(fold: Fold, one: SinkSettings, node: Connecting) -> NDArray[np.uint64]:
    """The vectors of the sink's dead letters, by the hashes of their names."""
    access, found = node.access(), [np.empty((0, 2), np.uint64)]
    for topic in dict.fromkeys(partition.topic for partition in fold.partitions):
        letters = dead_letter_topic(topic, one.name)
        try:
            partitions = access.log_status(letters)
        except NotFound:
            continue  # nothing was ever refused
        for status in partitions:
            reading = read_deltas(
                access,
                letters,
                status.partition,
                first=status.sequence_first,
                last=status.readable,
            )
            found += [deltas.vector for deltas, _ in reading]
    return np.concatenate(found)


def _compare_history(fold: Fold, lake: LakeSink, routes: Routes) -> Comparison:
    """A log partition at a time: that much is in memory."""
    found = Comparison()
    for partition in fold.partitions:
        where = (pc.field("topic") == partition.topic) & (
            pc.field("partition") == partition.partition
        )
        held = list(lake.history.batches(COMPARED, where=where))
        actual = pa.Table.from_batches(held) if held else _NO_HISTORY
        compare_history(routes.deltas(fold.released(partition)), actual, found)
    return found


def _compare_messages(
    fold: Fold, one: SinkSettings, routes: Routes, node: Connecting
) -> Comparison:
    read, usual = _FORWARDING[one.kind]
    by_topic: dict[str, list[pa.Table]] = {}
    for partition in fold.partitions:
        target = one.options.get("topic") or usual.format(topic=partition.topic)
        by_topic.setdefault(target, []).append(routes.deltas(fold.released(partition)))
    access = _node_of(one.options, node).access()
    whole = Comparison()
    for topic, released in by_topic.items():
        held = read(access, topic)
        whole.add(compare_forwarded(released, held, only_ours=one.kind == "notify"))
    return whole


def _node_of(options: dict[str, Any], node: Connecting) -> Connecting:
    """The node that a sink's options name, or the pipeline's own."""
    if "url" not in options:
        return node
    return Connecting(
        url=options["url"],
        api_key=options.get("api_key"),
        api_key_file=options.get("api_key_file"),
        tls=options.get("ca"),
    )


def always_behind(attached: Attached) -> bool:
    """Whether the sink rightly holds older states: a later change need not match its route."""
    return attached.routes.judge_states_by_deltas
