"""What a scrape shows of replicas, and the alert rules over it."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.node.metrics import Metrics, NodeReading
from penstock.node.replica_metrics import FollowerReading, ReplicaReading

ROOT = Path(__file__).resolve().parents[3]


def scrape(reading: ReplicaReading) -> str:
    metrics = Metrics()
    metrics.read_with(lambda: NodeReading(replicas=[reading]))
    return metrics.text().decode()


def test_a_replica_shows_its_role_and_how_far_it_is() -> None:
    text = scrape(ReplicaReading("jobs", 3, "following", epoch=7, sequence_committed=40))
    assert 'penstock_replica_role{partition="3",role="following",topic="jobs"} 1.0' in text
    assert 'penstock_replica_epoch{partition="3",topic="jobs"} 7.0' in text
    assert 'penstock_replica_committed{partition="3",topic="jobs"} 40.0' in text


def test_a_coordinator_shows_each_of_its_followers() -> None:
    slow = FollowerReading("b", lag=12, credit=0.25, lagging=True)
    text = scrape(ReplicaReading("jobs", 0, "serving", followers=(slow,)))
    assert 'penstock_follower_lag_entries{follower="b",partition="0",topic="jobs"} 12.0' in text
    assert 'penstock_follower_credit_ratio{follower="b",partition="0",topic="jobs"} 0.25' in text
    assert 'penstock_follower_lagging{follower="b",partition="0",topic="jobs"} 1.0' in text
    assert 'penstock_follower_learner{follower="b",partition="0",topic="jobs"} 0.0' in text


def test_alerts_speak_of_metrics_that_are_documented() -> None:
    documented = set(
        re.findall(r"^\| `(penstock_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.M)
    )
    used = set(re.findall(r"penstock_\w+", (ROOT / "deploy/alerts.yml").read_text()))
    assert len(used) > 5 and used <= documented


def test_alerts_about_followers_leave_out_who_only_learns() -> None:
    rules = re.findall(r"expr: (.*penstock_follower_.*)", (ROOT / "deploy/alerts.yml").read_text())
    assert len(rules) == 3
    assert all(rule.endswith(" unless penstock_follower_learner == 1") for rule in rules)
