"""Take a large seeded corpus to the lake by three ways, and compare the results.

    python scripts/determinism.py --deltas 1000000

One trigger, many small ones, and the batch job must give the same vectors bit for bit, with 5 % of
the deltas sent twice, 20 % out of order and 10 % concurrent from 4 origins. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.demo.corpus import CorpusOptions
from penstock.spark.session import spark_session
from penstock.testing.process import ServerProcess

sys.path.insert(0, str(Path(__file__).parents[1]))

from verification.determinism import Ways


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--deltas", type=int, default=1_000_000)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trigger-rows", type=int, default=20_000)
    return parser.parse_args()


async def main(given: argparse.Namespace) -> dict[str, Any]:
    options = CorpusOptions(
        deltas=given.deltas,
        vectors=given.vectors,
        duplicates=0.05,
        disorder=0.2,
        concurrent=0.1,
        origins=4,
        seed=given.seed,
    )
    with tempfile.TemporaryDirectory(prefix="penstock-determinism-") as name:
        folder = Path(name)
        server = ServerProcess(data=folder / "node")
        await server.start()
        try:
            return await asyncio.to_thread(run, server.url, folder, options, given.trigger_rows)
        finally:
            await server.stop()


def run(url: str, folder: Path, options: CorpusOptions, trigger_rows: int) -> dict[str, Any]:
    spark = spark_session("penstock-determinism")
    try:
        return Ways(spark, url, folder, options).compare(trigger_rows=trigger_rows)
    finally:
        spark.stop()


if __name__ == "__main__":
    found = asyncio.run(main(arguments()))
    print(json.dumps(found, indent=2))
    sys.exit(1 if found["different"] else 0)
