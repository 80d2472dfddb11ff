"""Counters and histograms that take a whole batch in one call.

prometheus_client's own histogram counts one observation at a time, under a lock, which costs a
batch of 100 some 200 µs. These add `count` observations of one value in half a microsecond: a
series is a plain list, found by its label values. There is no lock, so one thread records: the
event loop's. A scrape may run in another; it sees each number either before or after an update.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]

SERIES_MAX: Final = 10_000  # of one metric; what comes after is counted together
OTHER: Final = "(other)"


class _Instrument:
    """A metric's name, its labels and its series."""

    __slots__ = ("_labels", "_series", "_width", "help", "name")

    def __init__(self, name: str, help: str, labels: Sequence[str], *, width: int) -> None:
        self.name = name
        self.help = help
        self._labels = tuple(labels)
        self._width = width  # numbers in a series
        self._series: dict[Labels, list[float]] = {}
        if not labels:
            self._begin(())

    def begin(self, labels: Labels) -> None:
        """Show a zero before the first event: a rate can only be taken of what was there before."""
        if labels not in self._series:
            self._begin(labels)

    @property
    def labels(self) -> Labels:
        return self._labels

    def forget(self, label: str, value: str) -> None:
        """Drop the series of something that is no more."""
        if label in self._labels:
            at = self._labels.index(label)
            gone = [labels for labels in self._series if labels[at] == value]
            for labels in gone:
                del self._series[labels]

    def _begin(self, labels: Labels) -> list[float]:
        """A new series of zeros. Callers pass labels that are bounded by what exists (topics,
        methods, statuses); the limit is for the day somebody does not."""
        if len(self._series) >= SERIES_MAX:
            labels = (OTHER,) * len(self._labels)
        return self._series.setdefault(labels, [0] * self._width)

    def _rows(self) -> list[tuple[Labels, list[float]]]:
        return [(labels, list(series)) for labels, series in list(self._series.items())]


class Counter(_Instrument):
    """Only goes up. `name` comes without the `_total` that every counter ends in."""

    __slots__ = ()

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels, width=1)

    def add(self, labels: Labels, count: float = 1) -> None:
        series = self._series.get(labels) or self._begin(labels)
        series[0] += count

    def value(self, *labels: str) -> float:
        return self._series.get(labels, [0])[0]

    def collect(self) -> Metric:
        family = CounterMetricFamily(self.name, self.help, labels=self._labels)
        for labels, (value,) in self._rows():
            family.add_metric(labels, value)
        return family


class Histogram(_Instrument):
    """Counts per bucket, and the sum. `bounds` are the buckets' inclusive upper ends."""

    __slots__ = ("_bounds",)

    def __init__(
        self, name: str, help: str, labels: Sequence[str] = (), *, bounds: Sequence[float]
    ) -> None:
        self._bounds = tuple(bounds)
        # the buckets, the one to infinity, the sum
        super().__init__(name, help, labels, width=len(self._bounds) + 2)

    def observe(self, labels: Labels, value: float, count: int = 1) -> None:
        """`count` observations of `value`."""
        series = self._series.get(labels) or self._begin(labels)
        series[bisect_left(self._bounds, value)] += count
        series[-1] += value * count

    def count(self, *labels: str) -> int:
        return int(sum(self._series.get(labels, [0])[:-1]))

    def collect(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=self._labels)
        for labels, (*buckets, total) in self._rows():
            family.add_metric(labels, list(self._cumulative(buckets)), total)
        return family

    def _cumulative(self, buckets: list[float]) -> Iterator[tuple[str, float]]:
        ends = (*self._bounds, float("inf"))
        return zip(map(floatToGoString, ends), accumulate(buckets), strict=True)
