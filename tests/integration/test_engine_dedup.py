"""An enqueue is written once for each producer key, and answered the same each time."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.harness import Node, body, ids_of

from penstock.errors import InvalidArgument, SequenceConflict, StaleProducer
from penstock.model.batch import Kind
from penstock.model.entries import PRODUCER_NUMBER_MAX

ROWS = [{"payload": b"a"}, {"payload": b"b"}, {"payload": b"c"}]


async def test_a_repeated_request_returns_the_first_ids(node: Node) -> None:
    topic = await node.topic()
    first = await node.enqueue(topic, ROWS, producer=("p", 1, 1))
    await node.advance(5)
    again = await node.enqueue(topic, ROWS, producer=("p", 1, 1))
    assert ids_of(again) == ids_of(first)
    assert (len(first.duplicates), len(again.placed), len(again.duplicates)) == (0, 0, 3)
    assert await node.popped(topic) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("restart", ["clean", "snapshot", "crash"])
async def test_keys_are_remembered_over_restarts(node: Node, restart: str) -> None:
    topic = await node.topic()
    first = await node.enqueue(topic, ROWS, producer=("p", 3, 7))
    await node.ack(topic, await node.pop(topic, 3))
    if restart == "snapshot":
        await node.call("snapshot", topic=topic)
    await (node.crash() if restart == "crash" else node.restart())
    again = await node.enqueue(topic, ROWS, producer=("p", 3, 7))
    assert ids_of(again) == ids_of(first)
    assert await node.counts() == (0, 0, 0, 0)
    with pytest.raises(StaleProducer):
        await node.enqueue(topic, ROWS, producer=("p", 2, 1))


async def test_only_what_is_new_of_a_request_is_written(node: Node) -> None:
    topic = await node.topic()
    first = await node.enqueue(topic, ROWS[1:2], producer=("p", 1, 11))
    both = await node.enqueue(topic, ROWS, producer=("p", 1, 10))
    assert [d.index for d in both.duplicates] == [1]
    ids = ids_of(both)
    assert ids[1] == ids_of(first)[0] and len(set(ids)) == 3
    assert await node.popped(topic) == [b"b", b"a", b"c"]


async def test_a_lower_epoch_is_refused_and_a_higher_one_starts_afresh(node: Node) -> None:
    topic = await node.topic()
    await node.enqueue(topic, ROWS[:1], producer=("p", 5, 1))
    with pytest.raises(StaleProducer) as refused:
        await node.enqueue(topic, ROWS[:1], producer=("p", 4, 2))
    assert refused.value.details["epoch"] == 5
    fresh = await node.enqueue(topic, ROWS[:1], producer=("p", 6, 1))
    assert not fresh.duplicates
    with pytest.raises(StaleProducer):
        await node.enqueue(topic, ROWS[:1], producer=("p", 5, 2))
    assert await node.counts() == (2, 0, 0, 0)


async def test_producers_do_not_disturb_each_other(node: Node) -> None:
    topic = await node.topic()
    answers = await asyncio.gather(
        *(node.enqueue(topic, ROWS, producer=(f"p{i % 4}", 1, 1 + i // 8 * 3)) for i in range(16))
    )
    assert len({i for answer in answers for i in ids_of(answer)}) == 4 * 2 * 3
    assert sum(len(answer.duplicates) for answer in answers) == 24
    assert await node.counts() == (24, 0, 0, 0)


async def test_keys_are_forgotten_after_their_time(node: Node) -> None:
    topic = await node.topic(dedup_ms=10_000)
    await node.enqueue(topic, ROWS[:1], producer=("p", 1, 1))
    await node.advance(9)
    assert (await node.enqueue(topic, ROWS[:1], producer=("p", 1, 1))).duplicates
    await node.advance(2)
    await node.enqueue(topic, ROWS[:1], producer=("p", 1, 2))  # log time moves on
    assert not (await node.enqueue(topic, ROWS[:1], producer=("p", 1, 1))).duplicates


async def test_one_key_twice_in_a_request_is_refused(node: Node) -> None:
    topic = await node.topic()
    from penstock.model.batch import SCHEMAS, Kind

    body = SCHEMAS[Kind.ENQ].encode(
        2,
        {
            "payload": [b"a", b"b"], "run_count": [1, 1], "run_epoch": [1, 1],
            "run_sequence": [4, 4], "run_producer": [b"p", b"p"],
        },
        runs=2,
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match="twice"):
        await node.connection.enqueue(topic, [(0, 2, body)])


async def test_expected_sequence_is_the_last_enqueued_one(node: Node) -> None:
    topic = await node.topic()

    async def put(expected: int) -> int:
        answer = await node.enqueue(topic, ROWS, partition=0, expected_sequence=expected)
        return answer.placed[0].sequence + 2

    last = await put(0)
    await node.ack(topic, await node.pop(topic))  # other records do not move it
    with pytest.raises(SequenceConflict) as refused:
        await put(last - 1)
    assert refused.value.details["sequence"] == last
    after = await put(last)
    await node.restart()
    assert await put(after) > after


async def test_of_two_that_expect_the_same_one_wins(node: Node) -> None:
    topic = await node.topic()
    answers = await asyncio.gather(
        *(node.enqueue(topic, ROWS[:1], partition=0, expected_sequence=0) for _ in range(5)),
        return_exceptions=True,
    )
    assert sum(isinstance(a, SequenceConflict) for a in answers) == 4
    assert await node.counts() == (1, 0, 0, 0)


async def test_a_repeated_request_is_no_conflict_with_itself(node: Node) -> None:
    topic = await node.topic()
    how = {"partition": 0, "producer": ("p", 1, 1), "expected_sequence": 0}
    first = await node.enqueue(topic, ROWS, **how)
    assert ids_of(await node.enqueue(topic, ROWS, **how)) == ids_of(first)
    with pytest.raises(SequenceConflict):
        await node.enqueue(topic, ROWS, **{**how, "producer": ("p", 1, 4)})


async def test_expected_sequence_needs_one_partition(node: Node) -> None:
    topic = await node.topic(partitions=4)
    rows = [{"payload": b"x", "key": b"%d" % i} for i in range(20)]
    with pytest.raises(InvalidArgument, match="expected_sequence"):
        await node.enqueue(topic, rows, expected_sequence=0)


@pytest.mark.parametrize(
    ("field", "epoch", "sequence"),
    [
        ("run_epoch", PRODUCER_NUMBER_MAX + 1, 1),
        ("run_sequence", 1, PRODUCER_NUMBER_MAX),
        ("run_sequence", 1, (1 << 64) - 1),
    ],
)
async def test_numbers_that_no_snapshot_could_hold_are_refused(
    node: Node, field: str, epoch: int, sequence: int
) -> None:
    """Before, the largest were taken over the native protocol, and from then on no snapshot of the
    partition could be made."""
    topic = await node.topic(partitions=1)
    with pytest.raises(InvalidArgument, match=field):
        await node.enqueue(topic, [{"payload": b"x"}], producer=("p", epoch, sequence))
    assert await node.counts() == (0, 0, 0, 0)


async def test_a_log_with_such_numbers_still_has_snapshots(node: Node) -> None:
    """It was written before they were refused. Before, each snapshot failed with an OverflowError,
    and so nothing of the log was ever let go."""
    topic = await node.topic(partitions=1)
    partition = node.engine.topics[topic].here(0)
    packed = body([{"payload": b"x"}], producer=("p", 1, (1 << 64) - 1))
    batch = partition.append(Kind.ENQ, packed, 1)
    node.engine.topics[topic].wake()
    await partition.committed(batch.last)
    await node.call("snapshot")
    await node.crash()
    assert await node.popped(topic) == [b"x"]


async def test_duplicates_of_a_batch_come_in_its_order(node: Node) -> None:
    """Before, they came in the order in which the partitions had answered."""
    topic = await node.topic(partitions=4)
    rows = [{"payload": b"%d" % i, "key": b"%d" % i} for i in range(40)]
    first = await node.enqueue(topic, rows, producer=("p", 1, 1))
    again = await node.enqueue(topic, rows, producer=("p", 1, 1))
    assert [known.index for known in again.duplicates] == list(range(40))
    assert ids_of(again) == ids_of(first)
