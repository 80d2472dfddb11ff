"""When which fault happens: drawn from a seed before anything starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# How often each kind is drawn; every kind comes once before any comes by weight.
WEIGHTS: Final[dict[str, int]] = {
    "kill": 10, "pause": 8, "cut_one_way": 8, "cut_two_way": 5, "isolate": 5, "cut_etcd": 4,
    "etcd_kill": 4, "etcd_pause": 2, "rolling_restart": 2, "disk_full": 3, "fsync_fails": 3,
    "disk_fails": 3, "slow_disk": 3, "wipe": 2, "move": 2,
}  # fmt: skip
OVERLAP: Final = 0.35  # of the faults begin while the one before may still go on
# Of what is left out here, tests/integration/cluster has restarts in turn and lost disks
# (test_failover.py) and moves (test_moving.py); the rest comes with the long form only.
QUICK: Final = ("kill", "cut_one_way", "pause", "etcd_kill", "isolate", "fsync_fails", "disk_full",
                "cut_etcd", "cut_two_way", "kill")  # fmt: skip


@dataclass(frozen=True)
class Planned:
    at_s: float
    kind: str
    seed: int  # of the fault's own dice


def plan(*, seconds: float, count: int, seed: int, kinds: Sequence[str] = ()) -> list[Planned]:
    """`count` faults over `seconds`: in this order of `kinds`, or drawn by weight."""
    dice = random.Random(f"schedule {seed}")
    drawn = list(kinds) or _drawn(dice, count)
    gap = seconds / (len(drawn) + 1)
    planned, at = [], gap / 2
    for kind in drawn:
        planned.append(Planned(round(at, 3), kind, dice.randrange(1 << 30)))
        overlaps = dice.random() < OVERLAP
        at += gap * (dice.uniform(0.05, 0.3) if overlaps else 1.0)
    stretch = (seconds - gap / 2) / at
    return [Planned(round(p.at_s * stretch, 3), p.kind, p.seed) for p in planned]


def _drawn(dice: random.Random, count: int) -> list[str]:
    once = list(WEIGHTS)[:count]
    more = dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=max(0, count - len(once)))
    drawn = once + more
    dice.shuffle(drawn)
    return drawn
