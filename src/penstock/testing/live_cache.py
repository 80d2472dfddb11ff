"""The cache within the node, for those who measure it: `penstock.testing.live_cache:GatedCache`."""

from __future__ import annotations

from penstock.sinks.cache import CacheSink
from penstock.testing.live_sink import pass_gate


class GatedCache(CacheSink):
    """The cache in Redis, as the kind `cache` is, which opens when its gate does."""

    def __init__(self, name: str, *, url: str, gate: str = "") -> None:
        super().__init__(name, url=url)
        self._gate = gate

    def open(self) -> None:
        pass_gate(self._gate)
        super().open()
