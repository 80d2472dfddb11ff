"""What stages of all subjects share: how much work there is, messages, and quantiles."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import Corruption

PAYLOAD_BYTES: Final = 200
BATCH: Final = 100
PAYLOADS_DISTINCT: Final = 1000
WARM_SHARE: Final = 0.2  # of what is timed, at the start; it is not counted

Values = dict[str, float]
Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How much work a stage has to do, how often, and where."""

    folder: Path
    scale: float = 1.0  # 0.1 for a quick look
    runs: int = 1

    def count(self, full: int, *, step: int = BATCH) -> int:
        """`full` scaled, in whole steps."""
        return max(step, round(full * self.scale) // step * step)


def payloads(count: int = PAYLOADS_DISTINCT) -> list[bytes]:
    """Payloads that do not compress and are not all the same."""
    block = os.urandom(PAYLOAD_BYTES * count)
    return [block[at : at + PAYLOAD_BYTES] for at in range(0, len(block), PAYLOAD_BYTES)]


def batches() -> list[dict[str, Any]]:
    """The columns of some batches of 100 messages, to be enqueued in turn."""
    pool = payloads()
    priorities = np.random.default_rng(7).integers(0, 10, BATCH)
    return [
        {"payload": pool[at : at + BATCH], "priority": priorities}
        for at in range(0, len(pool), BATCH)
    ]


async def at_once(workers: int, turns: int, work: Callable[[int], Awaitable[Any]]) -> None:
    """Do the work of each turn, with so many turns under way at a time."""
    numbers = iter(range(turns))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(worker())


async def expect_empty(call: Callable[..., Awaitable[dict[str, Any]]], topic: str) -> None:
    stats = (await call("stats", topic=topic))["topics"][0]
    left = stats["ready"] + stats["leased"] + stats["delayed"]
    if left:
        raise Corruption(f"{left} messages are left after all were acknowledged")


def expect_payloads(columns: Any) -> None:
    """A consumer that never looks at a payload would flatter the server."""
    if not len(columns.binary("payload") or ()):
        raise Corruption("a delivery came without payloads")


def warm(took: Times) -> Times:
    """What counts of times in the order in which they were taken."""
    return took[int(len(took) * WARM_SHARE) :]


def quantiles(name: str, took: Times | list[float]) -> Values:
    return {f"{name}_p{part}": float(np.percentile(took, part)) for part in (50, 95, 99)}
