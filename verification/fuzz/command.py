"""Fuzz a node or a cluster for a while: `python -m verification.fuzz.command --minutes 9`."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from penstock.testing.cluster import cluster_processes
from penstock.testing.process import server_process
from verification.fuzz.driving import Driver, Findings, Target
from verification.fuzz.garbled import garble
from verification.fuzz.targets import ClusterTarget, NodeTarget


async def fuzz(folder: Path, *, seed: int, cases: range, seconds: float | None) -> Findings:
    """Run cases against a node of its own in `folder`."""
    async with server_process(folder / "data") as server:
        return await _run(NodeTarget(server), seed=seed, cases=cases, seconds=seconds)


async def fuzz_cluster(folder: Path, *, seed: int, cases: range, seconds: float | None) -> Findings:
    """Run cases against the three nodes of a cluster of its own in `folder`."""
    async with cluster_processes(folder, nodes=3) as cluster:
        return await _run(ClusterTarget(cluster), seed=seed, cases=cases, seconds=seconds)


async def fuzz_gateway(folder: Path, *, seed: int, cases: range, seconds: float | None) -> Findings:
    """Run cases against the gateway of a node of its own in `folder`."""
    from verification.fuzz.gateway_driving import GatewayDriver  # which needs an extra

    async with server_process(folder / "data") as server:
        target = NodeTarget(server)
        driver = GatewayDriver(target, seed)
        try:
            return await _run(target, driver=driver, seed=seed, cases=cases, seconds=seconds)
        finally:
            await driver.close()


async def _run(
    target: Target,
    *,
    seed: int,
    cases: range,
    seconds: float | None,
    driver: Driver | None = None,
) -> Findings:
    driver = driver or Driver(target, seed)
    try:
        await target.prepare()
        until = None if seconds is None else time.monotonic() + seconds
        await driver.run(cases, until=until)
    finally:
        await target.close()
    return driver.findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--case", type=int, default=None, help="this one alone")
    parser.add_argument("--cluster", action="store_true", help="what nodes say to each other")
    parser.add_argument("--gateway", action="store_true", help="HTTP and gRPC, not native frames")
    parser.add_argument("--garble", action="store_true", help="change what nodes say on its way")
    given = parser.parse_args()
    seed = random.randrange(1 << 32) if given.seed is None else given.seed
    one = given.case is not None
    cases = range(given.case, given.case + 1) if one else range(1 << 40)
    folder, seconds = Path(tempfile.mkdtemp(prefix="penstock-fuzz-")), given.minutes * 60
    if given.garble:
        work = garble(folder, seed=seed, seconds=seconds)
    else:
        run = fuzz_gateway if given.gateway else fuzz_cluster if given.cluster else fuzz
        work = run(folder, seed=seed, cases=cases, seconds=None if one else seconds)
    findings = asyncio.run(work)
    if findings.problems:
        print(f"data and logs are kept in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
