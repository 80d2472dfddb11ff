import asyncio
from typing import Any

import pytest

from penstock.errors import InvalidArgument, NotFound, StaleProducer
from penstock.model.entries import EntryRun
from penstock.model.ids import MessageId
from penstock.server.coalescer import FLIGHTS_MAX
from penstock.server.entries import Entry, joined_runs
from penstock.server.pool import GatewayLink
from penstock.wire.messages import Duplicate, Enqueued


def entry(payload: bytes, run: EntryRun | None = None) -> Entry:
    return Entry(payload, 0, b"", b"", 0, -1, run)


async def test_what_arrives_in_one_turn_goes_out_together(link: GatewayLink, node: Any) -> None:
    written = await asyncio.gather(*(link.desk.put("jobs", entry(b"%d" % i)) for i in range(50)))
    assert [request.parts[0].count for request, _ in node.enqueues] == [50]
    assert not node.enqueues[0][0].partitioned
    assert [MessageId.parse(w.message_id).sequence for w in written] == list(range(1, 51))


async def test_what_arrives_meanwhile_waits_for_the_flights(link: GatewayLink, node: Any) -> None:
    node.held = asyncio.Event()
    puts = []
    for i in range(6):
        puts.append(link.desk.put("jobs", entry(b"%d" % i)))
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
    puts = [link.desk.put("jobs", entry(p)) for p in (b"good", b"bad", b"fine")]
    good, bad, fine = await asyncio.gather(*puts, return_exceptions=True)
    assert good.message_id != fine.message_id
    assert isinstance(bad, InvalidArgument)


async def test_other_refusals_reach_everyone_and_are_not_repeated(
    link: GatewayLink, node: Any
) -> None:
    node.refuse_enqueue = lambda *_: NotFound("no such topic")
    puts = [link.desk.put("gone", entry(b"a")) for _ in range(3)]
    found = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(error, NotFound) for error in found)
    assert len({id(error) for error in found}) == 3
    assert len(node.enqueues) == 1


async def test_producer_keys_travel_as_runs_of_their_own(link: GatewayLink, node: Any) -> None:
    runs = [EntryRun(1, 2, s, b"p") for s in (5, 6, 9)]
    puts = [link.desk.put("jobs", entry(b"a", run)) for run in runs]
    puts.append(link.desk.put("jobs", entry(b"b")))
    await asyncio.gather(*puts)
    keyed = next(c for _, c in node.enqueues if c.runs)
    assert keyed.count == 3
    assert keyed.fixed("run_count").tolist() == [2, 1]
    assert keyed.fixed("run_sequence").tolist() == [5, 9]


async def test_a_stale_producer_does_not_fail_the_others(link: GatewayLink, node: Any) -> None:
    def refuse(request: Any, columns: Any) -> Any:
        return StaleProducer("old") if b"old" in list(columns.binary("run_producer")) else None

    node.refuse_enqueue = refuse
    old = link.desk.put("jobs", entry(b"a", EntryRun(1, 1, 1, b"old")))
    new = link.desk.put("jobs", entry(b"a", EntryRun(1, 1, 1, b"new")))
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
        puts = [link.desk.put("jobs", entry(b"good")), link.desk.put("jobs", bad_entry())]
        async with asyncio.timeout(30):
            found = await asyncio.gather(*puts, return_exceptions=True)
        assert all(isinstance(error, Exception) for error in found)
    async with asyncio.timeout(30):
        assert (await link.desk.put("jobs", entry(b"later"))).message_id


def bad_entry() -> Entry:
    return entry(b"x")._replace(max_retries=1.5)  # type: ignore[arg-type]


async def test_an_answer_that_cannot_be_read_fails_its_callers(
    link: GatewayLink, node: Any
) -> None:
    """Before, they waited for ever."""
    node.refuse_enqueue = lambda *_: Enqueued(1, [], [Duplicate(9, 0, 1, 1)])
    async with asyncio.timeout(30):
        puts = [link.desk.put("jobs", entry(b"a")), link.desk.put("jobs", entry(b"b"))]
        found = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(error, Exception) for error in found)
