"""The vectors on which pipeline and live path are measured, and their changes.

Every vector is created once; then come sparse changes of ten components at random vectors, by one
writer, in order: the shape that most deltas of an embedding store have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from penstock.client.delta.deltas import Deltas

DIMENSIONS: Final = 128
COMPONENTS: Final = 10
CHUNK: Final = 10_000  # deltas in one request


def vector_ids(count: int) -> list[str]:
    return [f"v{number:07d}" for number in range(count)]


async def create(topic: Deltas, ids: list[str], rng: np.random.Generator) -> None:
    for first in range(0, len(ids), CHUNK):
        chunk = ids[first : first + CHUNK]
        values = rng.standard_normal((len(chunk), DIMENSIONS), dtype=np.float32)
        await topic.put_columns(chunk, values)


async def change(topic: Deltas, ids: list[str], count: int, rng: np.random.Generator) -> None:
    """So many changes of random vectors."""
    for first in range(0, count, CHUNK):
        size = min(CHUNK, count - first)
        chosen = rng.integers(0, len(ids), size)
        values = rng.standard_normal((size, COMPONENTS), dtype=np.float32)
        await topic.put_columns([ids[i] for i in chosen], values, indices=_components(rng, size))


def payloads(ids: list[str], count: int, rng: np.random.Generator) -> list[bytes]:
    """So many changes of random vectors, as their writer's client would encode them."""
    from penstock.client.delta.writer import (
        DeltaColumns,
        HybridClock,
        Names,
        VectorHeads,
        encode_columns,
    )

    chosen = [ids[i] for i in rng.integers(0, len(ids), count)]
    values = rng.standard_normal((count, COMPONENTS), dtype=np.float32)
    columns = DeltaColumns(vector_ids=chosen, values=values, indices=_components(rng, count))
    names, origin = Names.of("default", chosen), b"bench"
    causes = VectorHeads(origin).chain(names, HybridClock())
    rows = np.arange(count)
    return encode_columns(columns.checked(), names, causes, origin=origin, rows=rows).tolist()


def _components(rng: np.random.Generator, count: int) -> NDArray[np.uint16]:
    """Ten different components per row, ascending: one out of each of ten equal stretches."""
    stretch = DIMENSIONS // COMPONENTS
    inside = rng.integers(0, stretch, (count, COMPONENTS))
    return (inside + np.arange(COMPONENTS) * stretch).astype(np.uint16)
