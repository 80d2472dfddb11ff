"""The demo's picture: drawn from a recording alone, and readable without seeing it."""

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest

from penstock.demo.picture.charts import breakers, charts, freshness, latency, throughput
from penstock.demo.picture.page import page
from penstock.demo.picture.samples import Event, Recording, Sample, Sighting, SinkSample, Span

VOID = {"meta", "br"}


def recorded() -> Recording:
    samples = [
        Sample(
            at=at / 2, written=400 * at, released=300 * at,
            sinks=(
                SinkSample(name="lake", lag_s=0.5, rows=at),
                SinkSample(
                    name="shop", lag_s=at / 4, rows=0, breaker="open" if 4 < at < 9 else "closed"
                ),
            ),
        )
        for at in range(20)
    ]  # fmt: skip
    probes = [Sighting(lane="CRITICAL", put_at=at, seen_at=at + 1.5) for at in range(8)]
    probes += [Sighting(lane="LOW", put_at=at, seen_at=at + 9) for at in range(8)]
    return Recording(samples, [Event(2, "a < b")], [Span(2, 5, "shop is down")], probes)


def document(*, ok: bool = True) -> dict[str, Any]:
    claims = [
        {"text": "first", "holds": True, "evidence": "1 < 2 & more"},
        {"text": "second", "holds": ok, "evidence": "counted"},
    ]
    return {
        "ok": ok, "claims": claims, "seconds": 61.2, "headline": {"deltas": "6 000"},
        "made": "Yesterday.",
    }  # fmt: skip


class Outline(HTMLParser):
    """Checks that tags are balanced, and collects what a test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name.endswith("href") or name == "src":
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_every_chart_is_svg_of_its_own() -> None:
    for chart in charts(recorded()):
        root = ElementTree.fromstring(chart.svg)
        assert root.tag.endswith("svg")
        assert "viewBox" in root.attrib and "width" not in root.attrib
        assert chart.title and chart.caption and len(chart.alt) > 40


def test_the_charts_say_in_words_what_they_show() -> None:
    recording = recorded()
    assert "7600 deltas were written and 5700 released" in throughput(recording).alt
    assert "lake 0.5 s, shop 4.8 s" in freshness(recording).alt
    assert "Opened: shop." in breakers(recording).alt
    assert "CRITICAL: median 1.5 s" in latency(recording).alt
    assert "shop is down" in freshness(recording).svg


def test_the_charts_of_nothing_are_drawn_too() -> None:
    assert all(chart.svg.startswith("<svg") for chart in charts(Recording()))


def test_the_page_is_whole_and_fetches_nothing() -> None:
    outline = Outline()
    text = page(document(), recorded())
    outline.feed(text)
    assert outline.open == []
    assert outline.headings == [
        "Throughput", "Freshness lag of each sink", "Circuit breakers", "Priorities",
        "What was checked",
    ]  # fmt: skip
    assert len(outline.ids) == len(set(outline.ids))
    assert all(reference.startswith("#") for reference in outline.references)
    assert {reference[1:] for reference in outline.references} <= set(outline.ids)
    assert "1 &lt; 2 &amp; more" in text and "<script" not in text


def test_the_page_shows_the_search_before_and_after() -> None:
    search = {
        "question": "space + comedy", "corrected": "B", "before": ["A", "C"], "after": ["B", "A"],
        "took_s": 1.26,
    }  # fmt: skip
    text = page({**document(), "figures": {"search": search}}, recorded())
    assert "<td>A</td><td><strong>B</strong></td>" in text and "1.3 s later" in text
    assert "Before" not in page(document(), recorded())


@pytest.mark.parametrize("ok", [True, False])
def test_the_page_tells_the_verdict(ok: bool) -> None:
    text = page(document(ok=ok), recorded())
    assert f"{2 if ok else 1} of 2 claims held, in 61 s" in text
    assert ("✗" in text) is not ok
