"""Serving without the gateway's packages, and giving memory back."""

import subprocess
import sys

import pytest

from penstock.errors import FailedPrecondition
from penstock.server.serve import load_gateway


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith(("penstock.server.g", "grpc"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(FailedPrecondition, match=r"penstock\[gateway\] \(grpc is missing\)"):
        load_gateway()


# In a process of its own: what other tests have left in the heap would be measured too.
PROGRAM = """
import asyncio
from pathlib import Path
from penstock.server import serve

def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)

async def main():
    serve.LOOK_S = 0.01
    giving = asyncio.ensure_future(serve.give_memory_back())
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
