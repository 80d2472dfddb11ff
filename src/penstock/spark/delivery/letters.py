"""Topics for letters, made on a node by the pipeline's access to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.sinks.letters import MISSING, letters_config, quarantine_topic

if TYPE_CHECKING:
    from penstock.spark.source.access import NodeAccess

__all__ = ["MISSING", "create_on", "quarantine_topic"]


def create_on(access: NodeAccess) -> Callable[[str], None]:
    """What makes a topic for letters on a node."""

    def create(topic: str) -> None:
        access.call("topic_create", config=letters_config(topic), exists_ok=True)

    return create
