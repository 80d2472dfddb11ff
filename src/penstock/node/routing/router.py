"""The node's way to partitions that other nodes serve, shared by all of its topics."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from penstock.node.routing.ports import ClusterView

Spawn = Callable[..., None]  # (coroutine, *, name): runs beside everything else


class Router:
    def __init__(self, view: Callable[[], ClusterView], *, spawn: Spawn) -> None:
        self._view, self._spawn = view, spawn

    @property
    def cluster(self) -> ClusterView:
        """As of now: a node that joins a cluster replaces its view."""
        return self._view()

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        self._spawn(work, name=name)
