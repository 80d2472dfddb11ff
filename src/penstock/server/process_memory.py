"""The memory of a node's process: what Python and the C library keep of what was used once.

An attack, or an honest burst, makes a node hold a lot for a moment. Python frees it, and glibc
keeps most of that for itself: small objects that live on lie between the freed ones, and only the
end of its heap goes back to the system. So buffers of a megabyte and more get memory of their own,
and what is free inside the heap is given back now and then. Other C libraries have none of these
functions, and need none.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from typing import Final

GC_THRESHOLD: Final = 20_000  # new objects between two looks at them
# Of glibc's malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX.
MALLOC_OPTIONS: Final = ((-3, 1 << 20), (-1, 16 << 20), (-8, 2))
LOOK_S: Final = 0.5
FREED_BYTES: Final = 16 << 20  # since it was given back last, from which it is worth the time
_library: Final = ctypes.CDLL(None)


class _MallocInfo(ctypes.Structure):
    """What glibc's `mallinfo2` tells, of which `fordblks` is the bytes that are free."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def settle_memory() -> None:
    """Let the collector forget what was imported, and look at new objects less often: hardly any
    of a message's are part of a cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    mallopt = getattr(_library, "mallopt", None)
    if mallopt is not None:
        for option, value in MALLOC_OPTIONS:
            mallopt(option, value)


async def give_memory_back() -> None:
    """Return what has become free in the heap to the system, until cancelled. Memory that was
    given back still counts as free, so it is the growth that tells.

    It is done in a thread, which holds neither the loop nor Python's lock meanwhile.
    """
    info, trim = getattr(_library, "mallinfo2", None), getattr(_library, "malloc_trim", None)
    if info is None or trim is None:
        return
    info.restype = _MallocInfo
    least = info().fordblks
    while True:
        await asyncio.sleep(LOOK_S)
        free = info().fordblks
        if free - least > FREED_BYTES:
            await asyncio.to_thread(trim, 0)
            least = info().fordblks
        else:
            least = min(least, free)
