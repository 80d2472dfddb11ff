"""Break a real cluster under load, again and again, then check everything it has promised.

    python scripts/chaos.py --minutes 10 --faults 60 --seed 1

Three nodes and etcd run in networks and on disks of their own (this takes root) while faults come
by a schedule that the seed decides. The verdict is printed as JSON. Ends with 1 unless it is ok,
and then leaves the folder with the history and the logs of all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chaos.playing import play
from tests.chaos.schedule import WEIGHTS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--kinds", default="", help=f"Only these, by comma: {', '.join(WEIGHTS)}")
    parser.add_argument("--rate", type=float, default=1.0, help="More or less load.")
    parser.add_argument("--folder", type=Path, help="Where to work. [default: a temporary one]")
    parser.add_argument("--keep", action="store_true", help="Leave the folder in any case.")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    named = [kind for kind in given.kinds.split(",") if kind]
    document = asyncio.run(
        play(
            folder, seconds=given.minutes * 60, faults=given.faults, seed=given.seed,
            kinds=[named[i % len(named)] for i in range(given.faults)] if named else [],
            rate=given.rate, say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )  # fmt: skip
    if document["ok"] and not given.keep:
        shutil.rmtree(folder)
    else:
        document["folder"] = str(folder)
        (folder / "verdict.json").write_text(json.dumps(document, indent=2))
    print(json.dumps(document, indent=2))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
