"""The end of the newest segment: nothing but zeros behind the last batch."""

from __future__ import annotations

import os

from penstock.log.crash import crash_point
from penstock.log.files import Handle
from penstock.log.layout import Mark
from penstock.log.walk import Walk


def clear_tail(handle: Handle, walk: Walk, used: int) -> None:
    """Zero `[walk.offset, used)`; the last flush mark then covers what is left of its group."""
    repaired: tuple[int, Mark] | None = None
    if walk.mark_at is not None and walk.flush_end != walk.offset:
        at, mark, batches_before = walk.mark_at
        kept = walk.batches - batches_before
        if kept == 0:
            walk.offset = at
        else:
            repaired = at, mark._replace(length=walk.offset - at, batches=kept)
    handle.write(_zeros(used - walk.offset), walk.offset)
    crash_point("log.recover.zeroed")
    if repaired is not None:
        at, mark = repaired
        place = Mark.place(walk.header.topic, walk.header.partition, at)
        handle.write([mark.encode(place)], at)
    os.fdatasync(handle.fd)


def _zeros(size: int) -> list[bytes]:
    block = bytes(min(max(size, 0), 1 << 20))
    whole = [block] * (size // len(block)) if block else []
    return [*whole, block[: size % len(block)]] if block else []
