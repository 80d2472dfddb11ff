"""The demo's eyes: the pipeline's status as samples, and changes looked for in the cache."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.demo.picture.samples import CLOSED, Sample, Sighting, SinkSample

LOOK_EVERY_S: Final = 0.05  # for probes: their latency is known this exactly
AWAITED_MAX: Final = 10_000


@dataclass
class WriteTimes:
    """When how many messages of a topic had been acknowledged."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def written(self) -> int:
        return self.counts[-1] if self.counts else 0

    def add(self, count: int, *, at: float) -> None:
        self.times.append(at)
        self.counts.append(self.written + count)

    def oldest_unread(self, read: int) -> float | None:
        """When the first message that was not yet read had been acknowledged; None: all read."""
        place = bisect_right(self.counts, read)
        return self.times[place] if place < len(self.times) else None


def look(
    status: Mapping[str, Any] | None, writes: Mapping[str, WriteTimes], *, at: float
) -> Sample:
    """What the pipeline says of itself, as of the moment `at` of the demo's own clock.

    A sink's lag is the age of the oldest change that it does not show: one that waits for the sink,
    or one that Spark has not read yet.
    """
    written = sum(times.written for times in writes.values())
    if status is None:
        return Sample(at=at, written=written, released=0)
    read = counts_of(status, "read")
    unread = [
        at - since
        for topic, times in writes.items()
        if (since := times.oldest_unread(read.get(topic, 0))) is not None
    ]
    waits = max(unread, default=0.0)
    return Sample(
        at=at,
        written=written,
        released=sum(counts_of(status, "released").values()),
        sinks=tuple(_sink(sink, waits) for sink in status["sinks"] if not sink["internal"]),
    )


def _sink(status: Mapping[str, Any], waits: float) -> SinkSample:
    return SinkSample(
        name=status["name"],
        lag_s=max(waits, float(status["lag"]["seconds"])),
        rows=int(status["rows"]),
        waiting=int(status["lag"]["rows"]),
        breaker=str(status["breaker"].get("state", CLOSED)).replace("_", "-"),
        failures=int(status["retries"]),
    )


def counts_of(status: Mapping[str, Any] | None, name: str) -> dict[str, int]:
    """One of the partitions' counts, summed by topic."""
    found: dict[str, int] = {}
    for partition in (status or {}).get("partitions", ()):
        topic = partition["topic"]
        found[topic] = found.get(topic, 0) + int(partition.get(name, 0))
    return found


Vector = tuple[str, str]  # namespace, vector id
Revisions = Callable[[Sequence[Vector]], Sequence[int]]  # 0: not there


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """A change that was put and is not visible yet."""

    vector: Vector
    revision: int
    lane: str
    put_at: float


class Prober:
    """Looks for changes until they are visible, in a thread that waits for nobody else."""

    def __init__(self, revisions: Revisions, *, clock: Callable[[], float]) -> None:
        self._revisions, self._clock = revisions, clock
        self.awaited: list[Awaited] = []
        self.seen: list[Sighting] = []

    def expect(self, vector: Vector, *, revision: int, lane: str) -> None:
        """A change was acknowledged just now."""
        assert len(self.awaited) < AWAITED_MAX
        self.awaited.append(
            Awaited(vector=vector, revision=revision, lane=lane, put_at=self._clock())
        )

    async def run(self) -> None:
        while True:
            if self.awaited:
                await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Ask once for everything that is awaited."""
        asked = list(self.awaited)
        found = await asyncio.to_thread(self._revisions, [one.vector for one in asked])
        now = self._clock()
        there = {
            id(one) for one, revision in zip(asked, found, strict=True) if revision >= one.revision
        }
        self.seen += [
            Sighting(lane=one.lane, put_at=one.put_at, seen_at=now)
            for one in asked
            if id(one) in there
        ]
        self.awaited = [one for one in self.awaited if id(one) not in there]
