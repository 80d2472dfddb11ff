"""What a test run starts does not outlive it, even if it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STARTER = """
import asyncio, sys
from pathlib import Path
from penstock.testing.cluster import ClusterProcesses

async def main():
    cluster = ClusterProcesses(Path(sys.argv[1]), nodes=1)
    await cluster.start_all()
    cluster.pause("n1")
    print(cluster.nodes["n1"].pid, cluster.etcd.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nodes_and_etcd_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        started = [int(pid) for pid in starter.stdout.readline().split()]
        try:
            assert len(started) == 2 and all(alive(pid) for pid in started)
            starter.kill()
            deadline = time.monotonic() + 30
            while any(alive(pid) for pid in started) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not any(alive(pid) for pid in started)
        finally:
            for pid in filter(alive, started):
                os.kill(pid, signal.SIGKILL)
