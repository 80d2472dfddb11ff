"""A hostile run: every attack on a node that serves a healthy client meanwhile, and the verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.hostile.attacks import (  # noqa: F401 - they register their attacks
    frames,
    grpc_calls,
    rebinding,
    secrets,
    strangers,
    unread,
)
from tests.hostile.crowd import Crowd, Tally
from tests.hostile.load import Health, Load, Sample, load
from tests.hostile.site import PROFILES, Profile, Site, site
from tests.hostile.stage import ATTACKS, Attack, Stage

HEALTHY_MS_P99_MAX: Final = 250.0
CALM_TIMES_MAX: Final = 5  # or so many times what it is without an attack, on a busy machine
GROWTH_MB_MAX: Final = 150.0
START_S: Final = 1.0  # in which connections are made
WARM_S: Final = 5.0
CONNECTIONS_MAX: Final = 4096  # as `limits.connections_max` is by default
AFTER_S: Final = 0.5  # the node also has to get rid of an attack
ATTACK_S_MAX: Final = 90.0  # beyond the time that it holds
GONE_S_MAX: Final = 15.0  # until nothing of attackers that are gone is held
PROBLEMS_SHOWN: Final = 8
PLAYS_MAX: Final = 3  # of an attack that missed the bar of time alone: the machine may be busy
AGAIN_S: Final = 5.0  # before it is played again: a burst of other work on the machine passes


@dataclass
class Outcome:
    """What the attacks on one node came to."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of requests during attacks
    calm: list[Sample] = field(default_factory=list)  # and before
    growth_mb: float = 0.0  # by one attack, at most
    above_warm_mb: float = 0.0  # at most, with what earlier attacks have left behind
    held_connections: int = 0
    held_bytes: int | None = None
    held_mb: float = 0.0
    epochs_moved: int = 0
    problems: list[str] = field(default_factory=list)


class Siege:
    """All attacks on the node of one profile, one after the other."""

    def __init__(self, site: Site, load: Load, *, seconds: float, say: Callable[[str], None]):
        self._site, self._load, self._seconds, self._say = site, load, seconds, say
        self._warm_mb = 0.0
        self._ms_p99_max = HEALTHY_MS_P99_MAX
        self.outcome = Outcome()

    async def run(self, attacks: Sequence[Attack]) -> Outcome:
        out = self.outcome
        await self._load.over(START_S)
        start = time.monotonic()
        calm = await self._load.over(WARM_S)
        out.calm = [sample for sample in self._load.samples if sample.due >= start]
        if calm.refused:
            out.problems.append(f"requests fail without an attack: {calm.errors}")
        self._warm_mb = self._site.rss_mb()
        self._ms_p99_max = max(HEALTHY_MS_P99_MAX, CALM_TIMES_MAX * calm.ms_p99)
        epochs = await self._site.epochs()
        self._say(f"{self._site.profile.name}: {self._warm_mb:.0f} MiB warm, calm {calm}")
        for attack in attacks:
            row = await self._best_of(attack)
            out.rows.append(row)
            if not self._site.server.running:
                out.problems.append(f"the node ended during {attack.name}")
                return out
        out.held_bytes = await self._left_over()
        out.held_mb = round(max(0.0, self._site.rss_mb() - self._warm_mb), 1)
        after = await self._site.epochs()
        out.epochs_moved = sum(after[name] != epoch for name, epoch in epochs.items())
        return out

    async def _best_of(self, attack: Attack) -> dict[str, Any]:
        row, samples = await self._play(attack)
        plays = 1
        while row["missed"] == ["healthy_ms_p99"] and plays < PLAYS_MAX:
            await asyncio.sleep(AGAIN_S)
            row, samples = await self._play(attack)
            plays += 1
        row["plays"] = plays
        self.outcome.samples += samples
        self.outcome.growth_mb = max(self.outcome.growth_mb, row["growth_mb"])
        above_mb = row.pop("above_warm_mb")
        self.outcome.above_warm_mb = max(self.outcome.above_warm_mb, above_mb)
        self.outcome.held_connections = max(self.outcome.held_connections, row["held_after"])
        return row

    async def _play(self, attack: Attack) -> tuple[dict[str, Any], list[Sample]]:
        site, tally = self._site, Tally()
        crowd = Crowd(site, tally, attack.sources)
        stage = Stage(site, crowd, tally, self._seconds)
        site.forget_peak()
        before_mb, start = site.rss_mb(), time.monotonic()
        try:
            async with asyncio.timeout(self._seconds + ATTACK_S_MAX):
                await attack.play(stage)
        except Exception as error:  # noqa: BLE001 - an attack that breaks off is a finding
            stage.problems.append(f"it broke off: {type(error).__name__}: {error}")
        accepted, held = tally.accepted, crowd.held()
        stage.expect(held <= CONNECTIONS_MAX, f"{held} connections are held at the same time")
        await crowd.close()
        await asyncio.sleep(AFTER_S)
        end = time.monotonic()
        held_after = await self._gone(crowd)
        if not site.server.running:
            return self._dead(attack, tally), []
        peak_mb = site.peak_mb()
        try:
            health = await self._load.between(start, end)
        except TimeoutError:
            stage.problems.append("the healthy client does not tell how it fares")
            health = Health.of([s for s in self._load.samples if start <= s.due < end])
        row = self._row(attack, stage, health) | {
            "accepted": accepted,
            "held": held,
            "held_after": held_after,
            "growth_mb": round(max(0.0, peak_mb - before_mb), 1),
            "above_warm_mb": round(max(0.0, peak_mb - self._warm_mb), 1),
            "took_s": round(end - start, 1),
        }
        row["missed"] = missed(row, ms_p99_max=self._ms_p99_max)
        row["verdict"] = "failed" if row["missed"] else "ok"
        self._say(f"{row}")
        return row, [s for s in self._load.samples if start <= s.due < end]

    async def _gone(self, crowd: Crowd) -> int:
        """How much the node still has of attackers that are gone, when it had time to notice."""
        deadline = time.monotonic() + GONE_S_MAX
        while (held := crowd.held()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return held

    async def _left_over(self) -> int | None:
        """The least that the node says to hold, when it had time to let go. The healthy client's
        requests of a moment are not left over."""
        least = await self._site.held_bytes()
        deadline = time.monotonic() + GONE_S_MAX
        while least and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            least = min(least, await self._site.held_bytes() or 0)
        return least

    def _row(self, attack: Attack, stage: Stage, health: Health) -> dict[str, Any]:
        return {
            "name": attack.name,
            "profile": self._site.profile.name,
            "connections": stage.tally.tried,
            "bytes_sent": stage.tally.bytes_sent,
            "notes": stage.tally.notes,
            "healthy_requests": health.requests,
            "healthy_ms_p50": health.ms_p50,
            "healthy_ms_p99": health.ms_p99,
            "refused_valid": health.refused,
            "errors": health.errors,
            "slowest_ms": health.slowest,
            "problems": stage.problems[:PROBLEMS_SHOWN],
            "problems_count": len(stage.problems),
        }

    def _dead(self, attack: Attack, tally: Tally) -> dict[str, Any]:
        problem = f"the node ended: {self._site.server.last_words()}"
        return {
            "name": attack.name, "profile": self._site.profile.name, "connections": tally.tried,
            "bytes_sent": tally.bytes_sent, "problems": [problem], "missed": ["problems"],
            "verdict": "failed", "growth_mb": 0.0, "above_warm_mb": 0.0, "healthy_ms_p99": 0.0,
            "held_after": 0,
        }  # fmt: skip


def missed(row: dict[str, Any], *, ms_p99_max: float = HEALTHY_MS_P99_MAX) -> list[str]:
    """The bars that an attack got past."""
    bars = {
        "healthy_ms_p99": row["healthy_ms_p99"] > ms_p99_max,
        "growth_mb": row["growth_mb"] > GROWTH_MB_MAX,
        "refused_valid": row["refused_valid"] > 0,
        "held_after": row["held_after"] > 0,
        "problems": bool(row["problems"]),
    }
    return [name for name, missed in bars.items() if missed]


async def play(
    folder: Path,
    *,
    chosen: Sequence[tuple[Profile, Attack]],
    seconds: float,
    say: Callable[[str], None],
    fresh: bool = False,
) -> dict[str, Any]:
    """Play attacks, those of a profile on one node, or with `fresh` each on its own."""
    groups: dict[str, tuple[Profile, list[Attack]]] = {}
    for profile, attack in chosen:
        name = f"{profile.name}-{attack.name}" if fresh else profile.name
        groups.setdefault(name, (profile, []))[1].append(attack)
    outcomes: list[Outcome] = []
    for name, (profile, attacks) in groups.items():
        async with site(folder / name, profile) as node, load(node) as healthy:
            siege = Siege(node, healthy, seconds=seconds, say=say)
            outcomes.append(await siege.run(attacks))
    return verdict(outcomes)


def verdict(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    rows = [row for outcome in outcomes for row in outcome.rows]
    health = Health.of([sample for outcome in outcomes for sample in outcome.samples])
    calm = Health.of([sample for outcome in outcomes for sample in outcome.calm])
    growth_mb = max((outcome.growth_mb for outcome in outcomes), default=0.0)
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    moved = sum(outcome.epochs_moved for outcome in outcomes)
    held = max((outcome.held_connections for outcome in outcomes), default=0)
    said = [outcome.held_bytes for outcome in outcomes if outcome.held_bytes is not None]
    good = all(row["verdict"] == "ok" for row in rows) and not (moved or health.refused)
    return {
        "ok": bool(rows) and good and not problems and not any(said),
        "healthy_requests": health.requests,
        "healthy_ms_p50": health.ms_p50,
        "healthy_ms_p99": health.ms_p99,
        "calm_ms_p50": calm.ms_p50,
        "calm_ms_p99": calm.ms_p99,
        "growth_mb": growth_mb,
        "above_warm_mb": max((outcome.above_warm_mb for outcome in outcomes), default=0.0),
        "refused_valid": health.refused,
        "epochs_moved": moved,
        "held_after": {
            "connections": held,
            "bytes": max(said, default=None),
            "rss_mb": max((outcome.held_mb for outcome in outcomes), default=0.0),
        },
        "attacks": rows,
        "problems": problems,
    }


def long_form() -> list[tuple[Profile, Attack]]:
    """Every attack in every profile that it is meant for."""
    return [
        (profile, attack)
        for profile in PROFILES.values()
        for attack in ATTACKS.values()
        if profile in attack.profiles
    ]


def short_form() -> list[tuple[Profile, Attack]]:
    """Most attacks, in one profile each."""
    return [(where, attack) for where, attack in long_form() if where is attack.short]
