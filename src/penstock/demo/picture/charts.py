"""The recording as four charts over one axis of time, each a piece of SVG with its own words."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.demo.picture.samples import CLOSED, Recording, quantile, rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN: Final = 9.6
MARGINS_IN: Final = {"left": 1.0, "right": 0.25, "bottom": 0.3, "top": 0.35}  # one axis for all
WORDS_SHARE: Final = 0.36  # of the first chart's height is for the names of the events
WORDS_ROWS: Final = 4
LETTER: Final = 0.0085  # of the axis's width
RATE_OVER_S: Final = 3.0  # rates are those of so many seconds: triggers come once in a while
INK: Final = "#1f2933"
MUTED: Final = "#66717d"
GRID: Final = "#e6e9ed"
OUTAGE: Final = "#fdecea"
# Told apart by people who do not see all colours, and in print by their brightness.
COLOURS: Final = ("#0b6fb8", "#0f8b6d", "#d98200", "#7a4fb5", "#c62f3b", "#5b6570")
BREAKER: Final = {CLOSED: "#bfe3d4", "open": "#d64550", "half-open": "#f2b84b"}
LANE_COLOURS: Final = {"CRITICAL": "#c62f3b", "LOW": "#0b6fb8"}
LAG_FLOOR_S: Final = 0.05  # what the logarithmic axes show for "at once"
STYLE: Final[Any] = {
    "font.size": 9.5, "font.family": "DejaVu Sans", "text.color": INK,
    "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": MUTED, "ytick.color": MUTED, "lines.linewidth": 1.8,
    "legend.frameon": False, "svg.fonttype": "none", "svg.hashsalt": "penstock",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    caption: str
    alt: str  # what a reader who cannot see the picture should know
    svg: str


def charts(recording: Recording) -> list[Chart]:
    """All of them, drawn from the recording alone."""
    return [throughput(recording), freshness(recording), breakers(recording), latency(recording)]


def throughput(recording: Recording) -> Chart:
    with _drawing(recording, height=2.8) as (figure, axes):
        for name, label, colour in (
            ("written", "written to the log", COLOURS[5]),
            ("released", "put in causal order by Spark", COLOURS[0]),
        ):
            times, values = rates(recording.samples, name, over_s=RATE_OVER_S)
            axes.plot(times, values, color=colour, label=label)
            axes.fill_between(times, values, color=colour, alpha=0.10, linewidth=0)
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.0) / (1 - WORDS_SHARE))
        _mark_events(axes, recording)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
        _legend(axes, columns=2)
        svg = _svg(figure)
    last = recording.samples[-1] if recording.samples else None
    written, released = (last.written, last.released) if last else (0, 0)
    best = max(rates(recording.samples, "released", over_s=RATE_OVER_S)[1], default=0.0)
    return Chart(
        title="Throughput",
        caption="Deltas per second, into the log and out of the causal order.",
        alt=f"Line chart of deltas per second over {recording.end:.0f} seconds."
        f" {written} deltas were written and {released} released,"
        f" at up to {best:.0f} per second.",
        svg=svg,
    )


def freshness(recording: Recording) -> Chart:
    names = recording.sink_names()
    with _drawing(recording, height=3.0) as (figure, axes):
        _shade(axes, recording)
        for number, name in enumerate(names):
            times, lags = recording.lags(name)
            colour = COLOURS[number % len(COLOURS)]
            shown = [max(lag, LAG_FLOOR_S) if lag else float("nan") for lag in lags]
            axes.plot(times, shown, color=colour, label=name)
        _logarithmic_seconds(axes)
        _legend(axes, columns=len(names) or 1)
        svg = _svg(figure)
    worst = {name: max(recording.lags(name)[1], default=0.0) for name in names}
    listed = ", ".join(f"{name} {lag:.1f} s" for name, lag in worst.items())
    return Chart(
        title="Freshness lag of each sink",
        caption="Age of the oldest change that a sink has yet to show. Each has a cursor of its"
        " own: the one that fails and the one that is slow fall behind alone. No line: nothing"
        " waits.",
        alt=f"Line chart of the freshness lag per sink. At worst: {listed or 'no sinks'}.",
        svg=svg,
    )


def breakers(recording: Recording) -> Chart:
    names = recording.sink_names()
    with _drawing(recording, height=0.65 + 0.3 * max(1, len(names))) as (figure, axes):
        _shade(axes, recording, text=False)
        for row, name in enumerate(names):
            for span in recording.breaker_spans(name):
                axes.barh(
                    row, max(span.end - span.begin, 0.15), left=span.begin, height=0.62,
                    color=BREAKER.get(span.text, MUTED), linewidth=0,
                )  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        for state, colour in BREAKER.items():
            axes.bar(0, 0, color=colour, label=state)
        _legend(axes, columns=len(BREAKER))
        svg = _svg(figure)
    opened = [n for n in names if any(s.text != CLOSED for s in recording.breaker_spans(n))]
    return Chart(
        title="Circuit breakers",
        caption="An open breaker leaves a failing sink alone for a while, then tries it once.",
        alt=f"Time line of each sink's breaker. Opened: {', '.join(opened) or 'none'}.",
        svg=svg,
    )


def latency(recording: Recording) -> Chart:
    with _drawing(recording, height=3.0) as (figure, axes):
        for lane in recording.lanes():
            probes = [probe for probe in recording.probes if probe.lane == lane]
            axes.scatter(
                [probe.put_at for probe in probes],
                [max(probe.took, LAG_FLOOR_S) for probe in probes],
                s=16, color=LANE_COLOURS.get(lane, MUTED), alpha=0.65, linewidth=0,
                label=f"{lane} (median {quantile(recording.took(lane), 0.5):.1f} s)",
            )  # fmt: skip
        _logarithmic_seconds(axes)
        _legend(axes, columns=len(recording.lanes()) or 1)
        svg = _svg(figure)
    listed = "; ".join(
        f"{lane}: median {quantile(recording.took(lane), 0.5):.1f} s,"
        f" 95 % within {quantile(recording.took(lane), 0.95):.1f} s"
        for lane in recording.lanes()
    )
    return Chart(
        title="Priorities",
        caption="From a put's acknowledgement to its change in the cache, by the moment of the"
        " put. People's edits do not wait for bulk work.",
        alt=f"Scatter plot of latency by priority class. {listed or 'No probes'}.",
        svg=svg,
    )


@contextmanager
def _drawing(recording: Recording, *, height: float) -> Iterator[tuple[Figure, Axes]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height))
        figure.subplots_adjust(
            left=MARGINS_IN["left"] / WIDTH_IN, right=1 - MARGINS_IN["right"] / WIDTH_IN,
            bottom=MARGINS_IN["bottom"] / height, top=1 - MARGINS_IN["top"] / height,
        )  # fmt: skip
        axes = figure.add_subplot()
        axes.set_xlim(recording.begin, max(recording.end, recording.begin + 1.0))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
        yield figure, axes


def _logarithmic_seconds(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(bottom=LAG_FLOOR_S * 0.8)
    axes.set_yticks([0.1, 1, 10, 60], ["0.1 s", "1 s", "10 s", "1 min"])
    axes.minorticks_off()


def _legend(axes: Axes, *, columns: int) -> None:
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, handlelength=1.2,
        columnspacing=1.6, borderaxespad=0.2,
    )  # fmt: skip


def _shade(axes: Axes, recording: Recording, *, text: bool = True) -> None:
    for span in recording.spans:
        axes.axvspan(span.begin, span.end, color=OUTAGE, linewidth=0, zorder=0)
        if text:
            axes.text(
                (span.begin + span.end) / 2, 0.97, span.text, transform=axes.get_xaxis_transform(),
                ha="center", va="top", fontsize=8.5, color=COLOURS[4],
            )  # fmt: skip


def _mark_events(axes: Axes, recording: Recording) -> None:
    """A thin line for each event, and its name in a row where it does not meet another."""
    width = max(recording.end - recording.begin, 1.0)
    taken = [0.0] * WORDS_ROWS  # up to where each row is full
    for event in recording.events:
        at = (event.at - recording.begin) / width
        if at < 0:
            continue
        axes.axvline(event.at, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
        length = LETTER * (len(event.text) + 2)
        right = at + length > 1
        start = at - length if right else at
        row = next((row for row, end in enumerate(taken) if end <= start), WORDS_ROWS - 1)
        taken[row] = start + length
        axes.text(
            event.at, 0.99 - WORDS_SHARE / WORDS_ROWS * row,
            f"{event.text} " if right else f" {event.text}",
            transform=axes.get_xaxis_transform(), ha="right" if right else "left", va="top",
            fontsize=8.5, color=MUTED,
        )  # fmt: skip


def _svg(figure: Figure) -> str:
    """The figure as an element that fits into a page: no prologue, scaled by its view box."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    opening = re.sub(r'\s(?:width|height)="[^"]*"', "", text[: text.index(">") + 1])
    return opening + text[text.index(">") + 1 :]
