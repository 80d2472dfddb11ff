import asyncio
from typing import Any

import pytest

from penstock.errors import InvalidArgument, NotFound, StaleProducer
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.delta import vector_hash
from penstock.model.entries import EntryRun
from penstock.model.ids import MessageId, partition_of, partitions_of_deltas
from penstock.model.topic import TopicConfig, TopicKind
from penstock.server.pool import (
    FLIGHTS_MAX,
    Entry,
    GatewayEntries,
    GatewayLink,
    joined_runs,
    packed_headers,
    producer_run,
)
from penstock.server.vocabulary import EnqueuedAnswer
from penstock.wire.messages import Duplicate, Enqueued

CONFIG = TopicConfig(name="jobs", payload_bytes_max=10)


def test_a_body_holds_every_column() -> None:
    entries = GatewayEntries(
        [b"a", b"bc"], [-1, 2], [b"k", b""], [packed_headers({"x": "y"}), b""], [0, 5], [-1, 3],
        [EntryRun(2, 4, 100, b"p1")],
    )  # fmt: skip
    columns = SCHEMAS[Kind.ENQ].decode(entries.body(), 2)
    assert columns.fixed("priority").tolist() == [-1, 2]
    assert columns.fixed("max_retries").tolist() == [-1, 3]
    assert list(columns.binary("payload")) == [b"a", b"bc"]
    assert columns.fixed("run_sequence").tolist() == [100]
    assert list(columns.binary("run_producer")) == [b"p1"]


def test_columns_of_defaults_are_absent() -> None:
    columns = SCHEMAS[Kind.ENQ].decode(GatewayEntries([b"a"], [0]).body(), 1)
    assert not {"key", "delay_ms"} & columns.views.keys() and columns.runs == 0


@pytest.mark.parametrize(
    ("entries", "field", "limit"),
    [
        (GatewayEntries([b"a", b"x" * 11], [0, 0]), "messages[1].payload", 10),
        (GatewayEntries([b"a"], [0], keys=[b"k" * 1025]), "messages[0].key", 1024),
        (GatewayEntries([b"a"], [0], headers=[b"h" * 16385]), "messages[0].headers", 16384),
        (
            GatewayEntries([b"a", b"b"], [0, 0], delays_ms=[0, -1]),
            "messages[1].delay_ms",
            31622400000,
        ),
        (GatewayEntries([b"a"], [0], max_retries=[1001]), "messages[0].max_retries", 1000),
        (GatewayEntries([b"a"] * 10_001, [0] * 10_001), "messages", 10_000),
    ],
)
def test_the_first_value_over_its_limit_is_named(
    entries: GatewayEntries, field: str, limit: int
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        entries.check(CONFIG)
    assert (refused.value.field, refused.value.limit) == (field, limit)


def test_expected_sequence_needs_keys_of_one_partition() -> None:
    eight = TopicConfig(name="jobs", partitions=8)
    one = GatewayEntries([b"a", b"b"], [0, 0], keys=[b"k", b"k"])
    assert one.partition(eight) == partition_of(b"k", 8)
    assert GatewayEntries([b"a"], [0]).partition(CONFIG) == 0
    for keys in (None, [b"k", b""], [b"k", b"other-2"]):
        with pytest.raises(InvalidArgument, match="expected_sequence"):
            GatewayEntries([b"a", b"b"], [0, 0], keys=keys).partition(eight)


def test_expected_sequence_of_deltas_needs_vectors_of_one_partition() -> None:
    config = TopicConfig(name="vectors", kind=TopicKind.DELTA, dimensions=2, partitions=8)
    one, other = (bytes(64) + vector_hash("n", name) for name in ("a", "b"))
    [home] = partitions_of_deltas([one], 8).tolist()
    assert GatewayEntries([one, one], [0, 0]).partition(config) == home
    with pytest.raises(InvalidArgument, match="expected_sequence"):
        GatewayEntries([one, other], [0, 0]).partition(config)


@pytest.mark.parametrize(
    ("producer", "epoch", "seq", "field"),
    [
        ("", 0, 1, "producer_id"),
        ("é" * 65, 0, 1, "producer_id"),
        ("p", 0, None, "seq"),
        ("p", 0, 1 << 63, "seq"),
        ("p", 1 << 63, 1, "epoch"),
    ],
)
def test_half_a_producer_key_is_refused(
    producer: str, epoch: int, seq: int | None, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        producer_run(producer, epoch=epoch, seq=seq, count=1)
    assert refused.value.field == field


def entry(payload: bytes, run: EntryRun | None = None) -> Entry:
    return Entry(payload, 0, b"", b"", 0, -1, run)


def gathered(link: GatewayLink, topic: str, entry: Entry) -> asyncio.Future[EnqueuedAnswer]:
    return link.coalescer(topic, entry).put(entry)


async def test_what_arrives_in_one_turn_goes_out_together(link: GatewayLink, node: Any) -> None:
    written = await asyncio.gather(*(gathered(link, "jobs", entry(b"%d" % i)) for i in range(50)))
    assert [request.parts[0].count for request, _ in node.enqueues] == [50]
    assert not node.enqueues[0][0].partitioned
    assert [MessageId.parse(w.message_id).sequence for w in written] == list(range(1, 51))


async def test_what_arrives_meanwhile_waits_for_the_flights(link: GatewayLink, node: Any) -> None:
    node.held = asyncio.Event()
    puts = []
    for i in range(6):
        puts.append(gathered(link, "jobs", entry(b"%d" % i)))
        await asyncio.sleep(0.001)
    assert [r.parts[0].count for r, _ in node.enqueues] == [1, 1]
    node.held.set()
    await asyncio.gather(*puts)
    assert [r.parts[0].count for r, _ in node.enqueues] == [1, 1, 4]


async def test_one_bad_entry_does_not_fail_its_neighbours(link: GatewayLink, node: Any) -> None:
    def refuse(request: Any, columns: Any) -> Any:
        bad = b"bad" in list(columns.binary("payload"))
        return InvalidArgument("no", field="payload") if bad else None

    node.refuse_enqueue = refuse
    puts = [gathered(link, "jobs", entry(p)) for p in (b"good", b"bad", b"fine")]
    good, bad, fine = await asyncio.gather(*puts, return_exceptions=True)
    assert good.message_id != fine.message_id
    assert isinstance(bad, InvalidArgument)


async def test_other_refusals_reach_everyone_and_are_not_repeated(
    link: GatewayLink, node: Any
) -> None:
    node.refuse_enqueue = lambda *_: NotFound("no such topic")
    puts = [gathered(link, "gone", entry(b"a")) for _ in range(3)]
    found = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(error, NotFound) for error in found)
    assert len({id(error) for error in found}) == 3
    assert len(node.enqueues) == 1


async def test_producer_keys_travel_as_runs_of_their_own(link: GatewayLink, node: Any) -> None:
    runs = [EntryRun(1, 2, s, b"p") for s in (5, 6, 9)]
    puts = [gathered(link, "jobs", entry(b"a", run)) for run in runs]
    puts.append(gathered(link, "jobs", entry(b"b")))
    await asyncio.gather(*puts)
    keyed = next(c for _, c in node.enqueues if c.runs)
    assert keyed.count == 3
    assert keyed.fixed("run_count").tolist() == [2, 1]
    assert keyed.fixed("run_sequence").tolist() == [5, 9]


async def test_a_stale_producer_does_not_fail_the_others(link: GatewayLink, node: Any) -> None:
    def refuse(request: Any, columns: Any) -> Any:
        return StaleProducer("old") if b"old" in list(columns.binary("run_producer")) else None

    node.refuse_enqueue = refuse
    old = gathered(link, "jobs", entry(b"a", EntryRun(1, 1, 1, b"old")))
    new = gathered(link, "jobs", entry(b"a", EntryRun(1, 1, 1, b"new")))
    assert (await new).message_id
    with pytest.raises(StaleProducer):
        await old


def test_runs_join_only_when_they_continue() -> None:
    runs = (
        EntryRun(1, 1, 1, b"a"),
        EntryRun(1, 1, 2, b"a"),
        EntryRun(1, 2, 3, b"a"),
        EntryRun(1, 2, 4, b"b"),
    )
    assert joined_runs(runs) == [
        EntryRun(2, 1, 1, b"a"),
        EntryRun(1, 2, 3, b"a"),
        EntryRun(1, 2, 4, b"b"),
    ]


async def test_a_flight_that_cannot_be_built_fails_its_callers_alone(
    link: GatewayLink, node: Any
) -> None:
    """What passes every check and still cannot be encoded. Before, those who shared its flight
    waited for ever."""
    for _ in range(FLIGHTS_MAX + 1):
        puts = [gathered(link, "jobs", entry(b"good")), gathered(link, "jobs", bad_entry())]
        async with asyncio.timeout(30):
            found = await asyncio.gather(*puts, return_exceptions=True)
        assert all(isinstance(error, Exception) for error in found)
    async with asyncio.timeout(30):
        assert (await gathered(link, "jobs", entry(b"later"))).message_id


def bad_entry() -> Entry:
    return entry(b"x")._replace(max_retries=1.5)  # type: ignore[arg-type]


async def test_an_answer_that_cannot_be_read_fails_its_callers(
    link: GatewayLink, node: Any
) -> None:
    """Before, they waited for ever."""
    node.refuse_enqueue = lambda *_: Enqueued(1, [], [Duplicate(9, 0, 1, 1)])
    async with asyncio.timeout(30):
        puts = [gathered(link, "jobs", entry(b"a")), gathered(link, "jobs", entry(b"b"))]
        found = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(error, Exception) for error in found)
