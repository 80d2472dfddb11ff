"""Work that goes on for as long as a node runs, whatever the metadata store answers.

A running node needs the store for changes alone. So a store that is away, that refuses us, or that
holds what nobody can read, takes nothing from it: the work begins anew after a pause. To end the
node instead would end all of them, for they share the store. Beginning anew is safe because such
work starts by reading what it needs; what was half done is never gone on from. Only what a node's
own disk does to it (`Fatal`) is let through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from penstock.errors import Fatal, PenstockError

TELL_S: Final = 60.0  # between two lines about the same trouble
log: Final = logging.getLogger(__name__)


async def repeat(work: Callable[[], Awaitable[None]], *, trouble: str, pause_s: float) -> NoReturn:
    """Do `work` until cancelled. It waits for its own next turn; there is a pause after failures,
    and a line that begins with `trouble` about the first of them and then now and then."""
    loop = asyncio.get_running_loop()
    told: type[Exception] | None = None
    told_at = 0.0
    while True:
        try:
            await work()
            told = None
        except Fatal:
            raise
        except Exception as error:  # noqa: BLE001 - it is logged, and the work must not end
            if type(error) is not told or loop.time() - told_at >= TELL_S:
                told, told_at = type(error), loop.time()
                _tell(trouble, error)
            await asyncio.sleep(pause_s)


def _tell(trouble: str, error: Exception) -> None:
    if isinstance(error, PenstockError):
        log.warning("%s: %s", trouble, error)
    else:
        log.error("%s", trouble, exc_info=error)
