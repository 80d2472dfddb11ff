"""What a node with sinks of its own has loaded before it serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, sys
from pathlib import Path
from penstock.config import Config
from penstock.propagation.options import LiveOptions
from tests.integration.harness import Node

SINK = {"topic": "vectors", "kind": "penstock.bench.live.sinks:NullSink", "name": "null"}

async def main(folder):
    node = Node(folder, Config(data=folder, live=LiveOptions(sink=(SINK,))))
    await node.start()
    print("pandas" in sys.modules)
    await node.stop()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_the_first_change_does_not_wait_for_what_arrow_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True"]
