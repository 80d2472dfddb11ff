"""The parts of the demo that can be asked for."""

from __future__ import annotations

from enum import StrEnum


class Act(StrEnum):
    ALL = "all"
    QUEUE = "queue"
    PIPELINE = "pipeline"
