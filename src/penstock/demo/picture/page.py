"""The picture as one file: claims, figures and charts, with nothing to fetch from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any, Final

from penstock.demo.picture.charts import Chart, charts
from penstock.demo.picture.samples import Recording

_CSS: Final = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 60rem; background: #fff;
  color: #1f2933; font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.02em; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .2rem; letter-spacing: -.01em; }
p { margin: .2rem 0 .8rem; max-width: 44rem; }
.lead { font-size: 1.1rem; color: #45515d; }
.verdict { font-weight: 600; color: #0b6b52; }
.verdict.failed { color: #b3261e; }
.muted, .claims td:last-child { color: #66717d; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 1rem 1.5rem;
  margin: 1.6rem 0 0; padding: 1.1rem 0; border: solid #e6e9ed; border-width: 1px 0; }
dt { font-size: .82rem; color: #66717d; }
dd { margin: 0; font-size: 1.5rem; font-weight: 600; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
figure { margin: .2rem 0 0; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif !important; }
table { border-collapse: collapse; width: 100%; font-size: .94rem; }
td, th { text-align: left; vertical-align: top; padding: .38rem .9rem .38rem 0;
  border-bottom: 1px solid #e6e9ed; }
th { font-weight: 600; }
td:first-child { width: 1.2rem; color: #0b6b52; }
td.failed { color: #b3261e; }
footer { margin-top: 3rem; font-size: .88rem; color: #66717d; }
"""


def page(document: dict[str, Any], recording: Recording) -> str:
    """The whole HTML text. `document` is the demo's own result, as `--json` prints it."""
    held = sum(claim["holds"] for claim in document["claims"])
    verdict = f"{held} of {len(document['claims'])} claims held, in {document['seconds']:.0f} s"
    kind = "verdict" if document["ok"] else "verdict failed"
    drawn = "\n".join(_figure(number, chart) for number, chart in enumerate(charts(recording)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Penstock: one run of the demo</title>\n<style>{_CSS}</style></head><body>\n"
        "<h1>Every change, once, in order, everywhere</h1>\n"
        '<p class="lead">One run of <code>penstock demo</code>: a node, writers that disagree,'
        " a Spark pipeline, and five sinks of which one is slow and one fails for a while.</p>\n"
        f'<p class="{kind}">{escape(verdict)}.</p>\n'
        f"{_tiles(document.get('headline', {}))}\n{drawn}\n"
        f"{_search(document.get('figures', {}).get('search'))}"
        f"<h2>What was checked</h2>\n{_claims(document['claims'])}\n"
        f"<footer>{escape(document.get('made', ''))} Every number on this page was measured"
        " during that run.</footer>\n</body></html>\n"
    )


def _tiles(headline: dict[str, str]) -> str:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in headline.items()
    )
    return f"<dl>{tiles}</dl>" if tiles else ""


def _figure(number: int, chart: Chart) -> str:
    """The chart under its heading; its alternative text is what a screen reader reads out."""
    name = f"chart-{number}"
    title = f'<title id="{name}">{escape(chart.alt)}</title>'
    opening, _, rest = chart.svg.partition(">")
    # One page holds several drawings, whose inner names must not meet.
    rest = rest.replace('id="', f'id="{name}-').replace("url(#", f"url(#{name}-")
    rest = rest.replace('href="#', f'href="#{name}-')
    svg = f'{opening} role="img" aria-labelledby="{name}">{title}{rest}'
    return (
        f"<h2>{escape(chart.title)}</h2>\n<figure>\n"
        f'<figcaption class="muted">{escape(chart.caption)}</figcaption>\n{svg}</figure>'
    )


def _search(search: dict[str, Any] | None) -> str:
    """The same question before and after a person's correction, side by side."""
    if search is None:
        return ""
    rows = "\n".join(
        f"<tr><td>{number}</td><td>{_found(before, search)}</td>"
        f"<td>{_found(after, search)}</td></tr>"
        for number, (before, after) in enumerate(
            zip(search["before"], search["after"], strict=True), 1
        )
    )
    head = '<tr><th><span aria-hidden="true"></span></th><th>Before</th><th>After</th></tr>'
    return (
        f"<h2>Nearest to “{escape(search['question'])}”</h2>\n"
        f'<p class="muted">An editor corrected one film; {search["took_s"]:.1f} s later the search'
        f" found it.</p>\n<table><thead>{head}</thead><tbody>\n{rows}\n</tbody></table>\n"
    )


def _found(name: str, search: dict[str, Any]) -> str:
    shown = escape(name)
    return f"<strong>{shown}</strong>" if name == search["corrected"] else shown


def _claims(claims: list[dict[str, Any]]) -> str:
    rows = "\n".join(
        f"<tr><td{'' if c['holds'] else ' class=failed'}>{'✓' if c['holds'] else '✗'}</td>"
        f"<td>{escape(c['text'])}</td><td>{escape(c['evidence'])}</td></tr>"
        for c in claims
    )
    head = '<tr><th><span aria-hidden="true"></span></th><th>Claim</th><th>Evidence</th></tr>'
    return f'<table class="claims"><thead>{head}</thead><tbody>\n{rows}\n</tbody></table>'
