"""The named crash points (`penstock.log.crash`), read from the code that passes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import penstock

_ROOT: Final = Path(penstock.__file__).parent


def _points_in(package: str) -> list[str]:
    pattern = re.compile(rf'"({package}\.[a-z]+\.[a-z]+)"')
    sources = [file.read_text() for file in (_ROOT / package).rglob("*.py")]
    return sorted({point for source in sources for point in pattern.findall(source)})


def _step(point: str) -> str:
    return point.split(".")[1]


# What only a replica of several passes, what only a node of a cluster does when it raises the
# generation of its data folder, and what every log and every node passes.
REPLICA_POINTS: Final = [
    point for point in _points_in("log") if _step(point) in ("replica", "truncate", "reset", "seed")
]
DISK_POINTS: Final = [
    "log.generation.written",
    *(point for point in _points_in("node") if _step(point) == "disk"),
]
LOG_POINTS: Final = [
    point for point in _points_in("log") if point not in REPLICA_POINTS + DISK_POINTS
]
NODE_POINTS: Final = [
    point for point in _points_in("node") if point not in DISK_POINTS and _step(point) != "follower"
]
