"""Memory that was needed once goes back to the system."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: what other tests have left in the heap would be measured too.
PROGRAM = """
import asyncio
from pathlib import Path
from penstock.server import process_memory

def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)

async def main():
    process_memory.LOOK_S = 0.01
    giving = asyncio.ensure_future(process_memory.give_memory_back())
    await asyncio.sleep(0)
    before = rss_mb()
    large = [(bytearray(b"x") * (60 << 10), bytearray(1000)) for _ in range(2000)]
    living = [small for _, small in large]
    held = rss_mb()
    assert held - before > 100
    del large
    async with asyncio.timeout(30):
        while rss_mb() > before + (held - before) / 4:
            await asyncio.sleep(0.01)
    giving.cancel()
    assert len(living) == 2000

asyncio.run(main())
"""


def test_what_is_freed_between_living_objects_is_given_back() -> None:
    """Before, a node kept what an attack had made it hold, although it held it no more."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
