"""The demo's account of a crash counts what was confirmed, not what the node is about to do."""

import asyncio
from typing import Any

from penstock.cli.demo import crash
from penstock.cli.demo.ledger import Lease, Ledger
from penstock.model.ids import LeaseToken

TOKEN = LeaseToken(0, 1, 7)


class Ahead:
    """A node whose statistics show an acknowledgement before it has answered it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.asked = 0

    async def call(self, name: str, **_: Any) -> dict[str, Any]:
        assert name == "stats"
        self.asked += 1
        if self.asked == 2:
            self.ledger.settled([1])
        await asyncio.sleep(0)
        return {"topics": [{"ready": 0, "delayed": 0, "leased": 0}]}

    async def lease_stream(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()


async def test_an_acknowledgement_under_way_is_waited_for() -> None:
    ledger = Ledger(visibility_ms=60_000, started={1}, put={1})
    ledger.delivered([(1, Lease(TOKEN, (0, 1)))])
    producers = asyncio.create_task(asyncio.sleep(0))
    await crash._drain(Ahead(ledger), ledger, producers)  # type: ignore[arg-type]
    assert ledger.done == {1}
