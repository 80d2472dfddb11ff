import asyncio
from typing import Any

import pytest

from penstock.errors import InvalidArgument, NotFound, StaleProducer
from penstock.model.ids import MessageId
from penstock.server.coalesce import Entry, joined_runs
from penstock.server.entries import Run
from penstock.server.pool import Link


def entry(payload: bytes, run: Run | None = None) -> Entry:
    return Entry(payload, 0, b"", b"", 0, -1, run)


async def test_what_arrives_in_one_turn_goes_out_together(link: Link, node: Any) -> None:
    written = await asyncio.gather(*(link.desk.put("jobs", entry(b"%d" % i)) for i in range(50)))
    assert [request.parts[0].count for request, _ in node.enqueues] == [50]
    assert not node.enqueues[0][0].partitioned
    assert [MessageId.parse(w.message_id).sequence for w in written] == list(range(1, 51))


async def test_what_arrives_meanwhile_waits_for_the_flights(link: Link, node: Any) -> None:
    node.held = asyncio.Event()
    puts = []
    for i in range(6):
        puts.append(link.desk.put("jobs", entry(b"%d" % i)))
        await asyncio.sleep(0.001)
    assert [r.parts[0].count for r, _ in node.enqueues] == [1, 1]
    node.held.set()
    await asyncio.gather(*puts)
    assert [r.parts[0].count for r, _ in node.enqueues] == [1, 1, 4]


async def test_one_bad_entry_does_not_fail_its_neighbours(link: Link, node: Any) -> None:
    def refuse(request: Any, columns: Any) -> Any:
        bad = b"bad" in list(columns.binary("payload"))
        return InvalidArgument("no", field="payload") if bad else None

    node.refuse_enqueue = refuse
    puts = [link.desk.put("jobs", entry(p)) for p in (b"good", b"bad", b"fine")]
    good, bad, fine = await asyncio.gather(*puts, return_exceptions=True)
    assert good.message_id != fine.message_id
    assert isinstance(bad, InvalidArgument)


async def test_other_refusals_reach_everyone_and_are_not_repeated(link: Link, node: Any) -> None:
    node.refuse_enqueue = lambda *_: NotFound("no such topic")
    puts = [link.desk.put("gone", entry(b"a")) for _ in range(3)]
    found = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(error, NotFound) for error in found)
    assert len({id(error) for error in found}) == 3
    assert len(node.enqueues) == 1


async def test_producer_keys_travel_as_runs_of_their_own(link: Link, node: Any) -> None:
    runs = [Run(1, 2, s, b"p") for s in (5, 6, 9)]
    puts = [link.desk.put("jobs", entry(b"a", run)) for run in runs]
    puts.append(link.desk.put("jobs", entry(b"b")))
    await asyncio.gather(*puts)
    keyed = next(c for _, c in node.enqueues if c.runs)
    assert keyed.count == 3
    assert keyed.fixed("run_count").tolist() == [2, 1]
    assert keyed.fixed("run_sequence").tolist() == [5, 9]


async def test_a_stale_producer_does_not_fail_the_others(link: Link, node: Any) -> None:
    def refuse(request: Any, columns: Any) -> Any:
        return StaleProducer("old") if b"old" in list(columns.binary("run_producer")) else None

    node.refuse_enqueue = refuse
    old = link.desk.put("jobs", entry(b"a", Run(1, 1, 1, b"old")))
    new = link.desk.put("jobs", entry(b"a", Run(1, 1, 1, b"new")))
    assert (await new).message_id
    with pytest.raises(StaleProducer):
        await old


def test_runs_join_only_when_they_continue() -> None:
    runs = (Run(1, 1, 1, b"a"), Run(1, 1, 2, b"a"), Run(1, 2, 3, b"a"), Run(1, 2, 4, b"b"))
    assert joined_runs(runs) == [Run(2, 1, 1, b"a"), Run(1, 2, 3, b"a"), Run(1, 2, 4, b"b")]
