"""Kill a server at random points, round after round on one folder, and check it each time.

    python scripts/crash_soak.py --minutes 10 --seed 42

Every round starts the server on what the one before left, arms a random point at a random pass,
and drives it until it dies there (or kills it after a while). The check is that of
`tests/integration/test_crash.py`. Ends with 1 at the first broken promise and leaves the folder.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.integration import crashing

from verification.crash_points import LOG_POINTS, NODE_POINTS

POINTS = (*LOG_POINTS, *NODE_POINTS)
ROUNDS_PER_FOLDER = 12  # then everything is drained and a new folder begun


async def soak_folder(folder: Path, dice: random.Random, until: float) -> crashing.Ledger:
    ledger = crashing.Ledger()
    last = False
    for run in range(1, ROUNDS_PER_FOLDER + 1):
        last = run == ROUNDS_PER_FOLDER or time.monotonic() > until
        point = f"{dice.choice(POINTS)}:{int(dice.expovariate(1 / 15)) + 1}"
        code = await crashing.crash_once(folder, point, ledger, run=run)
        await crashing.check(folder, ledger, drain=last)
        ended = {-9: "crashed", 0: "killed"}.get(code, f"ended with {code}")
        print(
            f"  {run:2} {point:28} {ended:10} {len(ledger.enqueued):6} enqueued"
            f" {len(ledger.done):6} done",
            flush=True,
        )
        ledger.note(code in (-9, 0), f"the server ended with {code} at {point}")
        if ledger.complaints or last:
            break
    return ledger


async def soak(root: Path, *, seed: int, minutes: float) -> int:
    dice = random.Random(seed)
    until = time.monotonic() + minutes * 60
    crashing.RUN_S = 6.0
    number = 0
    while time.monotonic() < until:
        number += 1
        folder = root / f"{number:04}"
        print(f"folder {folder}", flush=True)
        ledger = await soak_folder(folder, dice, until)
        if ledger.complaints:
            print("\n".join(ledger.complaints[:20]))
            print(f"seed {seed}, folder {number}: {len(ledger.complaints)} promises broken")
            return 1
        shutil.rmtree(folder)
    print(f"seed {seed}: no promise broken in {number} folders")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary one by default")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    root = arguments.folder or Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    root.mkdir(parents=True, exist_ok=True)
    return asyncio.run(soak(root, seed=arguments.seed, minutes=arguments.minutes))


if __name__ == "__main__":
    sys.exit(main())
