"""One partition's step: the state of its head by every way there is, and what it leaves behind.

On a real node, without Spark.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from tests.spark.conftest import RunningNode

from penstock.demo.corpus import ALL_OPS, CorpusOptions, generate
from penstock.errors import Corruption, StorageFailed
from penstock.model.delta import Delta, Op, encode
from penstock.propagation.fold.propagator import Propagator
from penstock.propagation.fold.snapshot import digest
from penstock.propagation.options import PropagationOptions
from penstock.sinks.protocol import Feed, Items
from penstock.spark.fold import partition_step
from penstock.spark.fold.local_state import StateCache, local_state
from penstock.spark.fold.partition_step import FoldPlan, PartitionStep, ReadRange, read_deltas
from penstock.spark.fold.state import ChangePart, FoldHead, read_section
from penstock.spark.source.access import NodeAccess, NodeTopicWriter
from penstock.spark.source.options import Connecting
from penstock.spark.store import StoreAddress

DIMENSIONS = 8
OPTIONS = CorpusOptions(
    deltas=1200,
    vectors=60,
    dimensions=DIMENSIONS,
    components=3,
    duplicates=0.05,
    disorder=0.2,
    concurrent=0.1,
    window=50,
    ops=ALL_OPS,
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node with the corpus in a delta topic of one partition."""
    running = RunningNode(tmp_path_factory.mktemp("node"))
    config = {"name": "vectors", "kind": "delta", "dimensions": DIMENSIONS}
    running.access().call("topic_create", config=config)
    writer = NodeTopicWriter(running.access)
    at = 1
    for chunk in generate(OPTIONS).chunks(100):
        payloads = pa.array(chunk.payloads.tolist(), pa.binary())
        sequences = np.arange(at, at + len(chunk))
        items = Items(sequences=sequences, payloads=payloads)
        writer.append("vectors", producer="corpus", epoch=1, items=items, partition=0)
        at += len(chunk)
    yield running
    NodeAccess.close_shared()
    running.close()


class Steps:
    """A pipeline's steps over one partition, as Spark would have them done."""

    def __init__(self, node: RunningNode, folder: Path, **plan: Any) -> None:
        self.folder, self.numbers = folder, itertools.count()
        self.data = folder / "changes/data"
        self.data.mkdir(parents=True)
        self.last = node.access().log_status("vectors")[0].readable
        self.plan = FoldPlan(
            pipeline="p-1",
            node=Connecting(url=node.url),
            state=StoreAddress(url=str(folder)),
            claim=1,
            dimensions={"vectors": DIMENSIONS, "orphans": DIMENSIONS},
            **{"options": PropagationOptions(), "snapshot_deltas": 1 << 40, **plan},
        )

    def run(
        self, head: FoldHead | None, first: int, last: int, *, at: str | None = None,
        cache: StateCache | None = None,
    ) -> tuple[FoldHead, ChangePart]:  # fmt: skip
        """`at` names the executor, a new one by default; each time it is another worker of it, or
        the one that has the cache."""
        found = ReadRange("vectors", 0, first, last)
        root = self.executor(at or f"new-{next(self.numbers)}")
        held = StateCache() if cache is None else cache
        return PartitionStep(self.plan, found, cache=held, root=root).run(head)

    def executor(self, name: str) -> Path:
        root = self.folder / "executors" / name
        root.mkdir(parents=True, exist_ok=True)
        return root

    def state(self, at: str) -> Propagator:
        """The state that an executor has."""
        options, key = self.plan.options, ("p-1", "vectors", 0)
        with local_state(key, options, cache={}, root=self.executor(at)) as local:
            state = local.found()
            assert state is not None
            local.settle(state)
        return state

    def in_ranges(self, size: int) -> tuple[FoldHead, list[ChangePart]]:
        head: FoldHead | None = None
        parts = []
        for first in range(1, self.last + 1, size):
            end = min(first + size - 1, self.last)
            head, part = self.run(head, first, end, at="one")
            parts.append(part)
        assert head is not None
        return head, parts

    def rows(self, part: ChangePart, kind: str) -> list[dict[str, Any]]:
        store = self.plan.state.open()
        tables = [read_section(store, part, s) for s in part.sections if s.kind == kind]
        return [row for table in tables for row in table.to_pylist()]


def direct(node: RunningNode, *, last: int | None = None) -> Propagator:
    """The whole log, or its beginning, in one fold."""
    last = last or node.access().log_status("vectors")[0].readable
    state = Propagator(DIMENSIONS)
    for deltas, through in read_deltas(node.access(), "vectors", 0, first=1, last=last):
        state.feed(deltas, through=through)
    return state


def test_the_states_written_are_those_of_a_direct_fold(node: RunningNode, tmp_path: Path) -> None:
    steps = Steps(node, tmp_path)
    _, parts = steps.in_ranges(170)
    found = {row["vector_id"]: row for part in parts for row in steps.rows(part, "states")}
    expected = direct(node).states()
    assert len(found) == len(expected)
    for row, name in enumerate(expected.vector_id):
        state = found[name.decode()]
        assert state["revision"] == expected.revision[row]
        assert state["deleted"] == expected.deleted[row]
        assert state["vector"] == expected.values[row].tolist()


def test_every_delta_is_released_once_in_order(node: RunningNode, tmp_path: Path) -> None:
    steps = Steps(node, tmp_path)
    _, parts = steps.in_ranges(170)
    deltas = [row for part in parts for row in steps.rows(part, "deltas")]
    assert [row["ordinal"] for row in deltas] == list(range(1, len(deltas) + 1))
    ids = [row["delta_id"] for row in deltas]
    assert len(set(ids)) == len(ids) == sum(part.counts["released"] for part in parts)
    seen: set[bytes] = set()
    for row in deltas:
        assert row["parent"] is None or row["parent"] in seen
        seen.add(row["delta_id"])
    assert all(row["payload"] is None for row in deltas)


def test_a_state_is_made_anew_from_log_snapshot_or_folder(
    node: RunningNode, tmp_path: Path
) -> None:
    """A task may land anywhere: with its state, behind it, ahead of it, or with nothing at all."""
    steps = Steps(node, tmp_path, snapshot_deltas=250)
    head, _ = steps.run(None, 1, 400, at="one")
    assert head.snapshots == ("00000001-vectors-0-400.base",)
    steps.run(head, 401, 401, at="behind")
    head, _ = steps.run(head, 401, 500, at="one")
    assert head.snapshot_sequence == 400
    results = [steps.run(head, 501, 700, at=at) for at in ("one", "behind", "one", None)]
    assert all(part == results[0][1] for _, part in results)
    assert len({head.snapshots for head, _ in results}) == 1
    assert len({path.name for path in steps.data.glob("*-501-700-*")}) == 1


def test_the_next_worker_reads_nothing_again(
    node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(node, tmp_path)
    head, _ = steps.run(None, 1, 400, at="one")
    first: list[int] = []

    def noting(*place: Any, **range_: Any) -> Iterator[tuple[Any, int]]:
        first.append(range_["first"])
        yield from read_deltas(*place, **range_)

    monkeypatch.setattr(partition_step, "read_deltas", noting)
    steps.run(head, 401, 500, at="one")
    assert first == [401]


def test_a_worker_that_stays_keeps_its_fold(node: RunningNode, tmp_path: Path) -> None:
    steps, cache = Steps(node, tmp_path), StateCache()
    head, _ = steps.run(None, 1, 100, at="one", cache=cache)
    fold = cache["p-1", "vectors", 0].fold
    head, _ = steps.run(head, 101, 200, at="one", cache=cache)
    assert cache["p-1", "vectors", 0].fold is fold
    head, _ = steps.run(head, 201, 300, at="one")  # by another worker
    steps.run(head, 301, 400, at="one", cache=cache)
    assert cache["p-1", "vectors", 0].fold is not fold
    assert digest(cache["p-1", "vectors", 0].fold) == digest(direct(node, last=400))


def test_the_cut_does_not_change_the_digest(node: RunningNode, tmp_path: Path) -> None:
    digests = set()
    for number, size in enumerate((60, 333, 5000)):
        steps = Steps(node, tmp_path / str(number), snapshot_deltas=200)
        steps.in_ranges(size)
        digests.add(digest(steps.state("one")))
    assert digests == {digest(direct(node))}


def test_a_full_disk_is_no_hindrance(
    node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, cache = Steps(node, tmp_path), StateCache()
    head, _ = steps.run(None, 1, 100, at="one", cache=cache)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    monkeypatch.setattr("penstock.propagation.fold.table.BYTES_MIN", 1)
    again, part = steps.run(head, 101, 1200, at="two", cache=cache)
    held = cache["p-1", "vectors", 0]
    assert held.generation is None and digest(held.fold) == digest(direct(node, last=1200))
    steps.run(again, 1201, steps.last, at="two", cache=cache)
    assert cache["p-1", "vectors", 0].fold is held.fold  # it stays where it is
    assert part.counts["read"] > 0


def test_a_folder_in_the_way_is_no_hindrance(node: RunningNode, tmp_path: Path) -> None:
    steps, cache = Steps(node, tmp_path), StateCache()
    (steps.executor("one") / "p-1").write_bytes(b"in the way")
    head, _ = steps.run(None, 1, 100, at="one", cache=cache)
    steps.run(head, 101, 200, at="one", cache=cache)
    assert digest(cache["p-1", "vectors", 0].fold) == digest(direct(node, last=200))


# --- snapshots ---


def test_snapshots_are_increments_until_they_are_as_large_as_the_base(
    node: RunningNode, tmp_path: Path
) -> None:
    steps = Steps(node, tmp_path, snapshot_deltas=1)
    head, chains = None, []
    for first in range(1, 1101, 10):
        head, _ = steps.run(head, first, first + 9, at="one")
        chains.append(head.snapshots)
        if head.increment_bytes:
            assert head.increment_bytes < 2 * head.base_bytes
    kinds = ["".join(name.rpartition(".")[2][0] for name in chain) for chain in chains]
    assert kinds[0] == "b" and "bi" in kinds and len({chain[0] for chain in chains}) > 2
    assert head is not None
    for at in ("one", None):
        again, _ = steps.run(head, 1101, 1150, at=at)
        assert again.sequence == 1150
    root = steps.executor("new-0")
    with local_state(("p-1", "vectors", 0), steps.plan.options, cache={}, root=root) as local:
        restored = local.found()
        assert restored is not None
        assert digest(restored) == digest(direct(node, last=1150))


def test_too_many_increments_are_followed_by_a_base(
    node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_step, "INCREMENTS_MAX", 2)
    monkeypatch.setattr(partition_step, "INCREMENTS_SHARE", 0)
    steps = Steps(node, tmp_path, snapshot_deltas=1)
    head, lengths = None, []
    for first in range(1, 81, 10):
        head, _ = steps.run(head, first, first + 9, at="one")
        lengths.append(len(head.snapshots))
    assert lengths == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_state_with_a_snapshot_that_nobody_committed_begins_with_a_base(
    node: RunningNode, tmp_path: Path
) -> None:
    """Its changes are noted since that snapshot, which the head does not name."""
    steps = Steps(node, tmp_path, snapshot_deltas=100)
    first, _ = steps.run(None, 1, 100, at="one")
    second, _ = steps.run(first, 101, 200, at="one")
    lost = msgspec.structs.replace(
        second, snapshots=first.snapshots, snapshot_sequence=100, found=()
    )
    third, _ = steps.run(lost, 201, 300, at="one")
    assert third.snapshots == ("00000001-vectors-0-300.base",)


def test_a_range_that_does_not_follow_is_refused(node: RunningNode, tmp_path: Path) -> None:
    steps = Steps(node, tmp_path)
    head, _ = steps.run(None, 1, 10)
    for first in (10, 12):
        with pytest.raises(Corruption, match="does not follow 10"):
            steps.run(head, first, 20)


def test_a_snapshot_of_another_sequence_is_refused(node: RunningNode, tmp_path: Path) -> None:
    steps = Steps(node, tmp_path, snapshot_deltas=1)
    head, _ = steps.run(None, 1, 10)
    wrong = msgspec.structs.replace(head, snapshot_sequence=9)
    with pytest.raises(Corruption, match="is of sequence 10, not 9"):
        steps.run(wrong, 11, 20)


def test_payloads_travel_only_when_a_sink_wants_them(node: RunningNode, tmp_path: Path) -> None:
    steps = Steps(node, tmp_path, feed=Feed.DELTAS | Feed.PAYLOADS)
    _, part = steps.run(None, 1, 50)
    assert all(len(row["payload"]) >= 112 for row in steps.rows(part, "deltas"))


def test_nothing_is_written_that_no_sink_takes(node: RunningNode, tmp_path: Path) -> None:
    steps = Steps(node, tmp_path, feed=Feed(0))
    head, part = steps.run(None, 1, 50)
    assert part.counts["released"] > 0 and head.sequence == 50
    assert part.file is None and not list(steps.data.iterdir())
    _, part = Steps(node, tmp_path / "deltas", feed=Feed.DELTAS).run(None, 1, 50)
    assert {section.kind for section in part.sections} == {"deltas"}


def test_an_error_leaves_no_half_folded_state_behind(node: RunningNode, tmp_path: Path) -> None:
    steps, cache = Steps(node, tmp_path), StateCache()
    head, _ = steps.run(None, 1, 10, at="one", cache=cache)
    steps.data.rename(tmp_path / "away")
    steps.data.write_bytes(b"in the way")
    with pytest.raises(StorageFailed, match="changes/data"):
        steps.run(head, 11, 50, at="one", cache=cache)
    assert len(cache) == 0
    assert not list(steps.executor("one").glob("p-1/*/facts"))
    steps.data.unlink()
    (tmp_path / "away").rename(steps.data)
    again, _ = steps.run(head, 11, 50, at="one", cache=cache)
    assert again == steps.run(head, 11, 50)[0]


def test_a_range_in_many_feeds_has_each_vector_once_as_it_is_at_the_end(
    node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pieces = Steps(node, tmp_path / "whole"), Steps(node, tmp_path / "pieces")
    _, expected = whole.run(None, 1, 700)
    monkeypatch.setattr(partition_step, "read_deltas", partial(read_deltas, bytes_max=1))
    _, part = pieces.run(None, 1, 700)
    for kind in ("states", "deltas"):
        assert pieces.rows(part, kind) == whole.rows(expected, kind)
    assert part.counts == expected.counts


def orphan(vector_id: str) -> bytes:
    """A delta whose parent was never written."""
    delta = Delta(
        delta_id=vector_id.encode() * 16,
        namespace="default",
        vector_id=vector_id,
        op=Op.SPARSE,
        origin="o",
        time=1 << 40,
        parent=b"p" * 16,
        clock={"o": 1},
        indices=np.array([0], np.uint16),
        values=np.array([1.0], np.float32),
    )
    return encode(delta, dimensions=DIMENSIONS)


def test_a_delta_without_its_parent_is_quarantined_with_its_bytes(
    node: RunningNode, tmp_path: Path
) -> None:
    config = {"name": "orphans", "kind": "delta", "dimensions": DIMENSIONS}
    node.access().call("topic_create", config=config, exists_ok=True)
    payloads = [orphan("a"), orphan("b")]
    items = Items(sequences=np.arange(1, 3), payloads=pa.array(payloads, pa.binary()))
    writer = NodeTopicWriter(node.access)
    writer.append("orphans", producer="o", epoch=1, items=items, partition=0)
    steps = Steps(node, tmp_path, options=PropagationOptions(pending_max=1))
    last = node.access().log_status("orphans")[0].readable
    found = ReadRange("orphans", 0, 1, last)
    step = PartitionStep(steps.plan, found, cache=StateCache(), root=steps.executor("one"))
    head, part = step.run(None)
    (row,) = steps.rows(part, "quarantine")
    assert (row["reason"], row["missing"], row["ordinal"]) == ("parent missing", b"p" * 16, 1)
    assert row["payload"] == payloads[0]
    assert (head.quarantined, part.counts["pending"]) == (1, 1)
