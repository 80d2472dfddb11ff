"""The demo's eyes: samples from a pipeline's status, and changes looked for until they show."""

from typing import Any, cast

from penstock.demo.archive.cinema import Cinema
from penstock.demo.archive.pipeline import STILLS
from penstock.demo.archive.watch import Prober, WriteTimes, counts_of, look
from penstock.demo.picture.samples import Sighting


def status(*, read: int, lag_s: float = 0.0, breaker: str = "closed") -> dict[str, Any]:
    """As `penstock pipeline run` writes it, as far as the demo looks."""
    sink = {
        "name": "cache", "internal": False, "lag": {"seconds": lag_s, "rows": 5}, "rows": 7,
        "retries": 2, "breaker": {"state": breaker},
    }  # fmt: skip
    return {
        "partitions": [
            {"topic": "stills", "partition": p, "read": read // 2, "released": 3} for p in (0, 1)
        ],
        "sinks": [sink, {**sink, "name": "_quarantine", "internal": True}],
    }


def test_the_ledger_knows_since_when_something_is_unread() -> None:
    ledger = WriteTimes()
    for count, at in ((10, 1.0), (5, 2.0)):
        ledger.add(count, at=at)
    assert ledger.written == 15
    assert [ledger.oldest_unread(read) for read in (0, 9, 10, 14, 15)] == [1.0, 1.0, 2.0, 2.0, None]


def test_a_sample_counts_what_waits_in_the_log_as_lag() -> None:
    ledger = WriteTimes()
    ledger.add(10, at=1.0)
    behind = look(status(read=8, lag_s=0.5), {"stills": ledger}, at=4.0)
    assert (behind.written, behind.released) == (10, 6)
    assert [(s.name, s.lag_s, s.rows, s.failures) for s in behind.sinks] == [("cache", 3.0, 7, 2)]
    level = look(status(read=10, lag_s=0.5, breaker="half_open"), {"stills": ledger}, at=4.0)
    assert (level.sinks[0].lag_s, level.sinks[0].breaker) == (0.5, "half-open")
    assert level.sinks[0].waiting == 5


def test_before_the_pipeline_says_anything_there_are_no_sinks() -> None:
    sample = look(None, {}, at=0.5)
    assert (sample.sinks, sample.released) == ((), 0)
    assert counts_of(None, "released") == {}


class Told:
    """A pipeline of which only the status is asked for."""

    def __init__(self) -> None:
        self.said = status(read=0)

    def status(self) -> dict[str, Any]:
        return self.said


def test_sinks_are_in_step_only_by_a_look_that_was_taken_after_the_last_write() -> None:
    told = Told()
    nobody: dict[str, Any] = dict.fromkeys(("server", "redis", "client", "screen", "cache"))
    house = Cinema(**nobody, pipeline=cast(Any, told), doing="")
    house.look()
    assert house.in_step()
    house.wrote(STILLS, 2)  # since then nobody has looked
    assert not house.in_step()
    house.look()
    assert not house.in_step()
    told.said = status(read=2)
    house.look()
    assert house.in_step()


async def test_the_prober_sees_each_change_once_and_when_it_is_there() -> None:
    shown = {("films", "a"): 1}
    now = 10.0
    prober = Prober(lambda vectors: [shown.get(v, 0) for v in vectors], clock=lambda: now)
    prober.expect(("films", "a"), revision=2, lane="CRITICAL")
    prober.expect(("films", "b"), revision=1, lane="LOW")
    await prober.look()
    assert prober.seen == []
    now, shown = 12.0, {("films", "a"): 2}
    await prober.look()
    now, shown = 15.0, {("films", "a"): 9, ("films", "b"): 1}
    await prober.look()
    assert prober.seen == [
        Sighting(lane="CRITICAL", put_at=10.0, seen_at=12.0),
        Sighting(lane="LOW", put_at=10.0, seen_at=15.0),
    ]
    assert prober.awaited == []
