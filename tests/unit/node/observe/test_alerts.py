"""The warnings about followers, and the alert rules over what a scrape shows."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.node.observe.metrics import Metrics

ROOT = Path(__file__).resolve().parents[4]
ALERTS, METRICS = ROOT / "deploy/alerts.yml", ROOT / "docs/metrics.md"


def test_a_warning_tells_of_whom_it_is() -> None:
    metrics = Metrics()
    metrics.follower_warnings.add(("jobs", "3", "b", "lagging"))
    metrics.follower_warnings.add(("jobs", "3", "b", "lagging"))
    series = '{follower="b",partition="3",topic="jobs",what="lagging"}'
    assert f"penstock_follower_warnings_total{series} 2.0" in metrics.text().decode()
    metrics.forget_topic("jobs")
    assert series not in metrics.text().decode()


def test_alerts_speak_of_metrics_that_are_documented() -> None:
    first_cells = re.findall(r"^\| (`penstock_[^|]*)\|", METRICS.read_text(), re.M)
    documented = {name for cell in first_cells for name in re.findall(r"`(penstock_\w+)`", cell)}
    used = set(re.findall(r"penstock_\w+", ALERTS.read_text()))
    assert len(used) > 5 and used <= documented


def test_every_alert_is_explained() -> None:
    text, explained = ALERTS.read_text(), METRICS.read_text()
    # A folded text (">-") goes on for as long as its lines are indented further than `expr`.
    rules = re.findall(r"^ {8}expr: (?:>-\n)?((?:.+\n)(?: {10}.+\n)*)", text, re.M)
    assert len(rules) == text.count("- alert:") == 13
    assert [rule for rule in rules if f"`{' '.join(rule.split())}`" not in explained] == []


def test_alerts_about_followers_leave_out_who_only_learns() -> None:
    rules = re.findall(r"expr: (.*penstock_follower_.*)", ALERTS.read_text())
    assert len(rules) == 3
    assert all(rule.endswith(" unless penstock_follower_learner == 1") for rule in rules)
