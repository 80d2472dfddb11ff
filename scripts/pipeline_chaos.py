"""Kill a pipeline's driver, node or Redis at random moments under load, then audit every sink.

    python scripts/pipeline_chaos.py --kills 20 --target driver --seed 7

Without `--target` each of the three is killed in turn. With `--cluster` the pipeline runs on a
Spark cluster whose machines share nothing but an S3 store; executors and drivers are killed, and
once a driver sleeps through its successor's work. Ends with 1 unless the audit finds that nothing
was lost and nothing happened twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.spark import chaos


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--target", choices=chaos.ON_CLUSTER)
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, help="Of load. [default: by the kills]")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    targets = [given.target] if given.target else list(chaos.TARGETS)
    if given.cluster and not given.target:
        targets = ["executor", "driver"]
    kills = [targets[i % len(targets)] for i in range(given.kills)]
    if given.cluster:
        kills.insert(len(kills) // 2, "zombie")
    seconds = given.seconds or sum(15.0 if kill == "driver" else 4.0 for kill in kills)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-chaos-"))
        stage = stack.enter_context(chaos.on_cluster(Path(folder))) if given.cluster else None
        document = asyncio.run(
            chaos.play(
                Path(folder), kills=kills, rows=given.rows, seconds=seconds, seed=given.seed,
                stage=stage, say=lambda line: print(line, flush=True),
            )
        )  # fmt: skip
    print(json.dumps(document, indent=2))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
