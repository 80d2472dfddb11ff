"""What a fold begins from, and how the log is cut into what the kernels get."""

from __future__ import annotations

import pytest

from penstock.demo.corpus import CorpusOptions, generate
from penstock.errors import FailedPrecondition
from penstock.model.batch import SCHEMAS, Batch, Kind, seal
from penstock.spark.fold.state import FoldHead, Heads, TopicHeads
from penstock.spark.jobs.log_fold import feeds_of, fold_tasks, reject_lost
from penstock.spark.source.ranges import FoldRange


def heads(*, snapshot: int = 0, start: int = 1, topic: int = 7) -> Heads:
    head = FoldHead(
        start=start, sequence=snapshot + 5, snapshot_sequence=snapshot,
        snapshots=("s",) if snapshot else (),
    )  # fmt: skip
    return {"t": TopicHeads(id=topic, dimensions=4, partitions={0: head})}


def log(first: int, last: int = 100) -> FoldRange:
    return FoldRange("t", 0, first, last, topic_id=7)


@pytest.mark.parametrize(
    ("first", "known", "use", "origin", "begin"),
    [
        (1, {}, "always", "log", 1),
        (1, heads(snapshot=40), "always", "snapshot", 41),
        (1, heads(snapshot=40), "if cut", "log", 1),
        (30, heads(snapshot=40), "if cut", "snapshot", 41),
        (41, heads(snapshot=40), "if cut", "snapshot", 41),
        (30, heads(start=30), "if cut", "log", 30),  # the pipeline itself began there
        (30, heads(start=35), "if cut", "log", 35),
    ],
)
def test_a_fold_begins_where_everything_is_there(
    first: int, known: Heads, use: str, origin: str, begin: int
) -> None:
    (task,) = fold_tasks([log(first)], known, use=use)  # type: ignore[arg-type]
    assert (task.origin, task.begin, task.loss) == (origin, begin, None)


@pytest.mark.parametrize(
    ("first", "last", "known", "why"),
    [
        (30, 100, {}, "no pipeline has a snapshot"),
        (30, 100, heads(snapshot=40, topic=8), "no pipeline has a snapshot"),
        (30, 100, heads(), "no snapshot of it yet"),
        (30, 35, heads(snapshot=40), "later than was asked for"),
        (50, 100, heads(snapshot=40), "no longer reaches"),
    ],
)
def test_what_is_missing_is_said(first: int, last: int, known: Heads, why: str) -> None:
    tasks = fold_tasks([log(first, last)], known, use="always")
    with pytest.raises(FailedPrecondition, match=why):
        reject_lost(tasks)


def deltas(count: int) -> list[Batch]:
    """Batches of two deltas each."""
    corpus = generate(CorpusOptions(deltas=2 * count, vectors=2, dimensions=4, components=2))
    payloads = corpus.chunk(0, 2 * count).payloads.tolist()
    found = []
    for first in range(1, 2 * count, 2):
        body = SCHEMAS[Kind.ENQ].encode(2, {"payload": payloads[first - 1 : first + 1]})
        found.append(
            seal(Kind.ENQ, body, topic=1, partition=0, epoch=1, epoch_previous=1, first=first,
                 count=2, time_ms=1, chain_previous=0)
        )  # fmt: skip
    return found


@pytest.mark.parametrize("cut", [0, 3, 4, 8])
def test_pieces_of_the_log_end_at_the_cut_and_begin_behind_what_is_folded(cut: int) -> None:
    log = deltas(4)
    slices = [log[:2], log[2:]]
    found = list(feeds_of(slices, first=2, cut=cut, last=8))
    assert [n for deltas, _ in found for n in deltas.sequences.tolist()] == list(range(2, 9))
    ends = [through for _, through in found]
    assert ends[-1] == 8
    assert cut in ends or cut == 0


def test_a_log_with_nothing_to_fold_still_gives_its_end() -> None:
    assert [through for _, through in feeds_of([], first=9, cut=0, last=8)] == [8]
