"""The second act: a film archive whose vectors change all day, and a pipeline that keeps up.

Thousands of stills are embedded by four models that do not wait for each other; two editors correct
films by hand. All of it goes through one node's log and one Spark pipeline into a lake, an index, a
cache, a partner who is slow and a shop that fails for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.console import cell
from penstock.demo.archive import films, writers
from penstock.demo.archive.account import audit_everything, count_everything
from penstock.demo.archive.cinema import Cinema
from penstock.demo.archive.pipeline import EDITS, FAILING, SLOW, STILLS, Scale
from penstock.demo.archive.search import Answers, find_the_fresh_change
from penstock.demo.chapters import Chapter
from penstock.demo.picture.samples import CLOSED, Sighting, SinkSample, Span, quantile
from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.demo.corpus import Corpus

# Patience for a busy machine; on a quiet one none of these is nearly reached.
START_S_MAX: Final = 240.0
CATCH_UP_S_MAX: Final = 240.0
BREAKER_S_MAX: Final = 180.0
BEHIND_TIMES: Final = 3  # the outage lasts until the shop is this much further behind than others
QUICK_SINKS: Final = ("lake", "index", "cache")
ALIKE: Final = ("index", "cache")  # fed vectors alone, as the slow sink is
SLOWER_TIMES: Final = 2  # more rows wait for the slow sink, on average, than for any other


@dataclass(kw_only=True)
class Play:
    """What the chapters share."""

    house: Cinema
    scale: Scale
    corpus: Corpus
    models: writers.Models
    editors: writers.Editors
    missing: bytes = b""  # the parent that never comes
    before: Answers | None = None


Part = Callable[["Play", Chapter], Awaitable[None]]


async def prologue(play: Play) -> list[Chapter]:
    return await _tell(play, ("Writers that disagree", write_first))


async def second_act(play: Play) -> list[Chapter]:
    return await _tell(
        play,
        ("In causal order, once, everywhere", settle_down),
        ("People overtake machines", overtake),
        ("The shop closes, and nobody else notices", lose_a_sink),
        ("A change that a search finds", find_fresh),
        ("Nothing lost, nothing twice", count_up),
    )


async def epilogue(play: Play, *, stop: bool) -> list[Chapter]:
    """The audit, after the pipeline was stopped or while it goes on running."""

    async def audit(play: Play, chapter: Chapter) -> None:
        await audit_everything(play.house, chapter, stop=stop)

    return await _tell(play, ("The audit", audit))


async def _tell(play: Play, *parts: tuple[str, Part]) -> list[Chapter]:
    chapters = []
    for title, part in parts:
        chapter = Chapter(title)
        await part(play, chapter)
        play.house.screen.chapter(chapter)
        chapters.append(chapter)
    return chapters


async def begin(house: Cinema, scale: Scale) -> Play:
    """Topics, the pipeline's process, and the writers."""
    await writers.create_topics(house)
    await house.pipeline.start()
    house.screen.say(f"penstock serve is process {house.server.pid}, at {house.server.url}")
    house.screen.say(f"Redis is process {house.redis.pid}, at {house.redis.url}")
    house.screen.say(f"penstock pipeline run is process {house.pipeline.pid}; Spark is starting")
    whole = await asyncio.to_thread(writers.corpus_of, scale)
    corpus, ends = writers.in_parts(whole, writers.PART_ENDS)
    stills = writers.hand(house, STILLS, origin="lookout", namespace=films.STILLS)
    hands = [
        writers.hand(house, EDITS, origin=name, namespace=films.FILMS) for name in writers.EDITORS
    ]
    return Play(
        house=house,
        scale=scale,
        corpus=corpus,
        models=writers.Models(house=house, corpus=corpus, ends=ends, deltas=stills),
        editors=writers.Editors(house=house, hands=hands),
    )


async def write_first(play: Play, chapter: Chapter) -> None:
    """The archive's first load, films, one orphan, and one mistake that is refused."""
    house, facts = play.house, play.corpus.facts
    await play.editors.fill()
    stranger = writers.hand(house, EDITS, origin=writers.STRANGER, namespace=films.FILMS)
    play.missing = await writers.put_an_orphan(house, stranger)
    refused = await _refusal(play)
    await play.models.write(within_s=1.0)
    chapter.note(
        f"  {cell(facts['vectors'])} stills of {films.DIMENSIONS} dimensions,"
        f" {cell(facts['rows'])} deltas by {facts['origins']} models:"
        f" {cell(facts['duplicates'])} arrive twice,\n  {cell(facts['early'])} before their parent,"
        f" {cell(facts['concurrent'])} were written without having seen the one before"
    )
    chapter.claim(
        "the log takes changes whether or not anybody reads them",
        house.written == play.models.position + len(films.CATALOGUE) + 1,
        f"{cell(house.written)} acknowledged in {house.now():.0f} s",
    )
    chapter.claim(
        "a change that makes no sense is refused by name", refused is not None, str(refused)
    )
    chapter.figures["corpus"] = facts


async def _refusal(play: Play) -> str | None:
    try:
        await play.editors.hands[0].set(films.MISFILED, {films.DIMENSIONS: 1.0})
    except InvalidArgument as error:
        return error.message
    return None


async def settle_down(play: Play, chapter: Chapter) -> None:
    """Until Spark has the first load in every sink."""
    house = play.house
    await house.until(lambda: bool(house.newest.sinks), within_s=START_S_MAX, what="Spark starts")
    house.mark("Spark reads")
    arrived = await house.until(
        house.in_step, within_s=CATCH_UP_S_MAX, what="the first load goes to five sinks"
    )
    play.before = await Answers.ask(house)
    rows = {sink.name: cell(sink.rows) for sink in house.newest.sinks}
    chapter.note("  rows written: " + ", ".join(f"{name} {count}" for name, count in rows.items()))
    chapter.claim(
        "five sinks show everything that was written", arrived,
        f"{cell(house.newest.released)} deltas in causal order after {house.now():.0f} s",
    )  # fmt: skip


@asynccontextmanager
async def _editing(play: Play) -> AsyncIterator[None]:
    """The editors are at work inside the block; what they have begun they finish."""
    end = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(play.editors.edit_until(end))
        try:
            yield
        finally:
            end.set()


async def overtake(play: Play, chapter: Chapter) -> None:
    """A new model re-embeds nearly everything at LOW priority; editors go on editing."""
    house, count = play.house, play.models.ends[0] - play.models.position
    began = house.now()
    house.mark("bulk work begins")
    house.doing = f"a model re-embeds: {cell(count)} LOW deltas against CRITICAL edits"
    async with _editing(play):
        await play.models.write(within_s=play.scale.bulk_s, probe=True)
        house.mark("bulk work is written")
        await house.until(
            lambda: not any(one.lane == "LOW" for one in house.prober.awaited),
            within_s=CATCH_UP_S_MAX, what="the bulk work drains, the edits pass it",
        )  # fmt: skip
    chapter.note(
        f"  {cell(count)} LOW deltas in one topic; {play.editors.edits} CRITICAL edits in another,"
        " which the pipeline reads first"
    )
    _judge_priorities(house, chapter)
    waiting = {
        name: house.recording.mean_waiting(name, since=began) for name in (SLOW, *QUICK_SINKS)
    }
    chapter.claim(
        "a slow sink falls behind alone",
        waiting[SLOW] > SLOWER_TIMES * max(waiting[name] for name in ALIKE),
        "rows that wait, on average: "
        + ", ".join(f"{name} {cell(round(rows))}" for name, rows in waiting.items()),
    )


def _judge_priorities(house: Cinema, chapter: Chapter) -> None:
    low, critical = (house.recording.took(lane) for lane in ("LOW", "CRITICAL"))
    (low_p50, low_p95), (edit_p50, edit_p95) = (
        (quantile(took, 0.5), quantile(took, 0.95)) for took in (low, critical)
    )
    passed = overtaken(house.recording.probes)
    chapter.claim(
        "an edit is visible long before the bulk work that was written before it",
        bool(low) and bool(critical) and edit_p95 < low_p50,
        f"CRITICAL 95 % within {edit_p95:.1f} s, LOW median {low_p50:.1f} s",
    )
    chapter.claim(
        "edits pass what was put before them",
        passed > 0,
        f"{passed} of {len(low)} LOW changes were overtaken by a later edit",
    )
    chapter.headline["a person's edit is visible in"] = (
        f"{edit_p50:.1f} s (95 % within {edit_p95:.1f} s)"
    )
    chapter.headline["bulk work, meanwhile, in"] = f"{low_p50:.1f} s (95 % within {low_p95:.1f} s)"
    chapter.figures |= {
        "edit_s_p50": round(edit_p50, 3), "edit_s_p95": round(edit_p95, 3),
        "bulk_s_p50": round(low_p50, 3), "bulk_s_p95": round(low_p95, 3),
    }  # fmt: skip


def overtaken(probes: list[Sighting]) -> int:
    """LOW changes that were put before an edit and seen after it."""
    edits = [probe for probe in probes if probe.lane == "CRITICAL"]
    return sum(
        any(edit.put_at > low.put_at and edit.seen_at < low.seen_at for edit in edits)
        for low in probes
        if low.lane == "LOW"
    )


async def lose_a_sink(play: Play, chapter: Chapter) -> None:
    """The shop fails until its breaker is open, and for a while more; then it comes back."""
    house = play.house
    await house.until(house.in_step, within_s=CATCH_UP_S_MAX, what="all sinks catch up")
    began = house.now()
    house.pipeline.outage.touch()
    house.mark("the shop closes")
    async with _editing(play):
        async with asyncio.TaskGroup() as group:
            group.create_task(play.models.write(within_s=play.scale.bulk_s))
            opened = await house.until(
                lambda: _sink(house, FAILING).breaker != CLOSED,
                within_s=BREAKER_S_MAX, what="the shop fails, its breaker counts",
            )  # fmt: skip
        await house.until(
            lambda: _sink(house, FAILING).lag_s > BEHIND_TIMES * _others_lag(house, since=began),
            within_s=BREAKER_S_MAX, what="the shop stays closed, the others go on",
        )  # fmt: skip
        house.pipeline.outage.unlink()
        house.recording.spans.append(Span(began, house.now(), f"the {FAILING} is closed"))
        house.mark("the shop is open again")
        back = await house.until(
            lambda: _sink(house, FAILING).breaker == CLOSED,
            within_s=BREAKER_S_MAX, what="the breaker tries the shop again",
        )  # fmt: skip
    level = await house.until(house.in_step, within_s=CATCH_UP_S_MAX, what="the shop catches up")
    house.mark("all sinks in step")
    _judge_outage(play, chapter, began=began, opened=opened, back=back and level)


def _judge_outage(play: Play, chapter: Chapter, *, began: float, opened: bool, back: bool) -> None:
    """All sinks are judged by their worst moment since the shop closed: a busy machine delays what
    every one of them shows."""
    house = play.house
    behind = house.recording.worst_lag(FAILING, since=began)
    others = {name: house.recording.worst_lag(name, since=began) for name in QUICK_SINKS}
    worst = max(others.values())
    shop = next(sink for sink in house.status["sinks"] if sink["name"] == FAILING)
    chapter.note(f"  meanwhile at worst: {', '.join(f'{n} {v:.1f} s' for n, v in others.items())}")
    chapter.claim(
        "after some failures in a row the breaker opens", opened,
        f"{shop['retries']} tries failed, the breaker opened {shop['breaker']['opened']} times",
    )  # fmt: skip
    chapter.claim(
        "no other sink waits for it",
        worst < behind / 2,
        f"the shop was {behind:.1f} s behind, the worst of the others {worst:.1f} s",
    )
    chapter.claim(
        "it comes back by itself and catches up", back,
        f"{cell(shop['rows'])} rows there, {cell(shop['coalesced'])} older ones left out",
    )  # fmt: skip
    chapter.headline["the closed shop was behind by"] = f"{behind:.1f} s"
    chapter.headline["the worst of lake, index and cache, meanwhile"] = f"{worst:.1f} s"


def _others_lag(house: Cinema, *, since: float) -> float:
    return max(house.recording.worst_lag(name, since=since) for name in QUICK_SINKS)


def _sink(house: Cinema, name: str) -> SinkSample:
    found = house.newest.sink(name)
    return found or SinkSample(name=name, lag_s=0.0, rows=0)


async def find_fresh(play: Play, chapter: Chapter) -> None:
    assert play.before is not None
    await find_the_fresh_change(play.house, play.editors, chapter, before=play.before)


async def count_up(play: Play, chapter: Chapter) -> None:
    house = play.house
    await house.until(house.in_step, within_s=CATCH_UP_S_MAX, what="the last changes arrive")
    await count_everything(house, play.corpus, play.editors, chapter, missing=play.missing)
