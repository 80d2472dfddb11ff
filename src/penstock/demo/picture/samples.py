"""What the demo saw while the pipeline ran: the source of its claims and of its picture.

All times are seconds since the recording began. Nothing here is made up afterwards: samples come
from the pipeline's own status, probes from changes that the demo put and then looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

CLOSED: Final = "closed"
LEAD_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class SinkSample:
    """One sink at one moment."""

    name: str
    lag_s: float  # age of the oldest change that it has yet to show; 0 when there is none
    rows: int  # written so far
    waiting: int = 0  # rows that are ready for it
    breaker: str = CLOSED
    failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    at: float
    written: int  # deltas in the log, as far as their writers know
    released: int  # deltas that the pipeline has put in order
    sinks: tuple[SinkSample, ...] = ()

    def sink(self, name: str) -> SinkSample | None:
        return next((sink for sink in self.sinks if sink.name == name), None)


@dataclass(frozen=True)
class Event:
    """A moment that the picture marks."""

    at: float
    text: str


@dataclass(frozen=True)
class Span:
    """A stretch of time that the picture shades."""

    begin: float
    end: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One change, from the acknowledgement of its put to the moment it was seen in a sink."""

    lane: str
    put_at: float
    seen_at: float

    @property
    def took(self) -> float:
        return self.seen_at - self.put_at


@dataclass
class Recording:
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    probes: list[Sighting] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.samples[-1].at if self.samples else 0.0

    @property
    def begin(self) -> float:
        """Shortly before the first trigger's outcome: what there is to see begins there."""
        released = next((s.at for s in self.samples if s.released), 0.0)
        return max(0.0, released - LEAD_S)

    def sink_names(self) -> list[str]:
        """In the order of their first appearance."""
        return list(dict.fromkeys(sink.name for s in self.samples for sink in s.sinks))

    def lags(self, name: str) -> tuple[list[float], list[float]]:
        """Times and freshness lags of one sink."""
        found = [(s.at, sink.lag_s) for s in self.samples if (sink := s.sink(name)) is not None]
        return [at for at, _ in found], [lag for _, lag in found]

    def worst_lag(self, name: str, *, since: float) -> float:
        times, lags = self.lags(name)
        return max((lag for at, lag in zip(times, lags, strict=True) if at >= since), default=0.0)

    def mean_waiting(self, name: str, *, since: float) -> float:
        """How many rows waited for a sink, on average."""
        found = [s.sink(name) for s in self.samples if s.at >= since]
        rows = [sink.waiting for sink in found if sink is not None]
        return sum(rows) / len(rows) if rows else 0.0

    def breaker_spans(self, name: str) -> list[Span]:
        """The states of a sink's breaker, one after the other without a gap."""
        spans: list[Span] = []
        for sample in self.samples:
            sink = sample.sink(name)
            if sink is None:
                continue
            if spans and spans[-1].text == sink.breaker:
                spans[-1] = Span(spans[-1].begin, sample.at, sink.breaker)
            else:
                begin = spans[-1].end if spans else sample.at
                spans.append(Span(begin, sample.at, sink.breaker))
        return spans

    def took(self, lane: str) -> list[float]:
        """Latencies of one class of probes, sorted."""
        return sorted(probe.took for probe in self.probes if probe.lane == lane)

    def lanes(self) -> list[str]:
        return list(dict.fromkeys(probe.lane for probe in self.probes))


def rates(
    samples: Sequence[Sample], field_name: str, *, over_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """A counter's growth per second at each sample, over the last `over_s` seconds at least."""
    times, found = [], []
    begin = 0
    for end, after in enumerate(samples):
        while begin + 1 < end and samples[begin + 1].at <= after.at - over_s:
            begin += 1
        before = samples[begin]
        if after.at > before.at:
            grown = getattr(after, field_name) - getattr(before, field_name)
            times.append(after.at)
            found.append(max(0.0, grown / (after.at - before.at)))
    return times, found


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that at least the share `q` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -int(-q * len(ordered) // 1) - 1))]
