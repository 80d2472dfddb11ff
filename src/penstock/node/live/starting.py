"""Where a subscription begins: now, at a position, at a time, or where its cursor stands."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidArgument
from penstock.node.live.catching_up import oldest_position
from penstock.node.live.cursors import Cursor
from penstock.node.streams import gone

if TYPE_CHECKING:
    from penstock.node.live.partition import LivePartition


OLDEST: Final = -1  # as `at`: what the log has of old


async def position_of(
    live: LivePartition, *, start: str, at: int, stored: Cursor | None, committed: int
) -> int:
    """The first position that is wanted. `committed` is from when the request came."""
    if start == "now":
        return committed + 1
    if start == "time":
        found = await asyncio.to_thread(live.log.find_time, at, through=committed)
        return max(found, oldest_position(live))
    if start == "cursor":
        if stored is not None:
            at = stored.position + 1
        elif not at:
            return committed + 1
    elif start != "sequence":
        raise InvalidArgument("start must be one of now, sequence, time, cursor", field="start")
    oldest = oldest_position(live)
    if at <= 0:
        return oldest
    if at < oldest:
        raise gone(at, sequence_first=oldest)
    return at


def opened_at(live: LivePartition, first: int) -> dict[str, int]:
    """What a subscriber is told of where it starts."""
    releases = live.releases
    ordinal = releases.ordinal_at(first - 1) if first <= live.sequence else releases.ordinal
    return {
        "position": first - 1,
        "ordinal": ordinal,
        "epoch": live.partition.coordinator.epoch,
        "sequence_committed": live.sequence_committed,
    }
