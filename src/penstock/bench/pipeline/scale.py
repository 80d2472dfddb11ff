"""How the fold grows: the same work by more tasks, and the same work over more vectors.

Rows per second should follow the tasks as far as there are cores, and should not care how many
vectors there are; memory should follow the vectors, and nothing faster.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.bench.pipeline.load import PARTITIONS, Load, PipelineBench
from penstock.bench.pipeline.stages import folded
from penstock.bench.stages import Values
from penstock.bench.vectors import DIMENSIONS, create, vector_ids

TASKS: Final = (1, 2, 4)
MILLIONS: Final = (1, 4, 10)
_MILLION: Final = 1_000_000


def tasks(bench: PipelineBench, folder: Path) -> Values:
    """The changes of the other stages, folded by more and more tasks at a time."""
    found = {
        f"tasks{number}_per_s": folded(bench, folder / str(number), sinks=[], tasks=number)
        for number in TASKS
    }
    return found | {"tasks_ratio": found[f"tasks{TASKS[1]}_per_s"] / found["tasks1_per_s"]}


async def vectors(bench: PipelineBench, folder: Path, *, scale: float) -> Values:
    """Creations of more and more vectors: how fast they are folded, what their state takes on the
    executor's disk, and what of it the fold's processes have in memory."""
    import penstock

    found: Values = {}
    for millions in MILLIONS:
        count, topic = round(millions * _MILLION * scale), f"bench-scale-{millions}"
        async with penstock.connect(bench.load.url) as client:
            opened = client.deltas(topic, dimensions=DIMENSIONS, create=True, partitions=PARTITIONS)
            await create(opened, vector_ids(count), np.random.default_rng(millions))
        load = Load(server=bench.load.server, vectors=0, deltas=count, topic=topic)
        own = PipelineBench(bench.spark, load, bench.local)
        before = _fold_memory()
        name, state = f"vectors{millions}m", folder / str(millions)
        found |= {
            f"{name}_per_s": await asyncio.to_thread(folded, own, state, sinks=[]),
            f"{name}_state_bytes": _disk_bytes(bench.local, state) / count,
            f"{name}_memory_mb": (_fold_memory() - before) / (1 << 20),
        }
        async with penstock.connect(bench.load.url) as client:
            await client.topic(topic, create=False).delete(force=True)
    first, last = (f"vectors{number}m" for number in (MILLIONS[0], MILLIONS[-1]))
    times = MILLIONS[-1] / MILLIONS[0]
    return found | {
        "vectors_rate_ratio": found[f"{last}_per_s"] / found[f"{first}_per_s"],
        "vectors_state_ratio": found[f"{last}_state_bytes"] / found[f"{first}_state_bytes"],
        # By vector, so that 1 is as many times the memory for as many times the vectors.
        "vectors_memory_ratio": found[f"{last}_memory_mb"] / found[f"{first}_memory_mb"] / times,
    }


def _disk_bytes(local: Path, folder: Path) -> int:
    """What the states of a pipeline's partitions take below the executor's folder."""
    from penstock.spark.fold.state import read_identity
    from penstock.spark.store import FolderStore

    identity = read_identity(FolderStore(folder / "state"))
    assert identity is not None, "the pipeline has run"
    files = (path for path in local.rglob(f"penstock/{identity.id}/*/*") if path.is_file())
    return sum(path.stat().st_blocks * 512 for path in files)


def _fold_memory() -> int:
    return sum(map(_resident_bytes, _fold_workers()))


def _fold_workers() -> Iterator[int]:
    """The Python processes that Spark keeps for the fold."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if b"PENSTOCK_WORKERS=fold" in (entry / "environ").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue  # it ended while we looked


def _resident_bytes(pid: int) -> int:
    """A process' share of what is in memory: pages that several map count once in all."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    line = next(row for row in text.splitlines() if row.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def draw(values: dict[str, Any], file: Path) -> None:
    """Both tables as a picture."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    left.plot(TASKS, [values[f"tasks{n}_per_s"] / 1000 for n in TASKS], "o-")
    left.set(
        title=f"{os.cpu_count()} cores", xlabel="tasks", ylabel="thousand deltas/s", xticks=TASKS
    )
    for axis, key, unit, by in (
        (middle, "per_s", "thousand vectors/s", 1000),
        (right, "memory_mb", "MB in memory", 1),
    ):
        axis.plot(MILLIONS, [values[f"vectors{n}m_{key}"] / by for n in MILLIONS], "o-")
        axis.set(xlabel="million vectors", ylabel=unit, xticks=MILLIONS)
    for axis in (left, middle, right):
        axis.set_ylim(0, axis.dataLim.y1 * 1.1)
    figure.savefig(file)
    plt.close(figure)
