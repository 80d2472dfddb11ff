"""Kill a pipeline's driver, node or Redis at random moments under load, then audit every sink.

    python scripts/pipeline_chaos.py --kills 20 --target driver --seed 7

Without `--target` each of the three is killed in turn. Ends with 1 unless the audit finds that
nothing was lost and nothing happened twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.spark import chaos


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--target", choices=chaos.TARGETS)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, help="Of load. [default: by the kills]")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    targets = [given.target] if given.target else list(chaos.TARGETS)
    kills = [targets[i % len(targets)] for i in range(given.kills)]
    seconds = given.seconds or sum(15.0 if kill == "driver" else 4.0 for kill in kills)
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        document = asyncio.run(
            chaos.play(
                Path(folder), kills=kills, rows=given.rows, seconds=seconds, seed=given.seed,
                say=lambda line: print(line, flush=True),
            )
        )  # fmt: skip
    print(json.dumps(document, indent=2))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
