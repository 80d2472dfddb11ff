"""Pieces of a buffer, wherever they lie: gathered, packed and joined without a loop over rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.model.columns import Binary, Buffer
from penstock.model.delta_format import refuse

Rows = NDArray[np.int64]


class Slices:
    """Slices of a buffer as bytes."""

    __slots__ = ("_view",)

    def __init__(self, blob: Buffer) -> None:
        self._view = memoryview(blob)

    def __getitem__(self, some: slice) -> bytes:
        return self._view[some].tobytes()


def gather(blob: Buffer, starts: Rows, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The records of `dtype` that begin at `starts`: one copy each, wherever they lie."""
    if not len(starts):
        return np.empty(0, dtype)
    size = dtype.itemsize
    places = len(blob) - size + 1
    everywhere: NDArray[Any] = np.ndarray((places,), f"V{size}", blob, strides=(1,))
    return everywhere[starts].view(dtype)


def sixteens(pairs: NDArray[np.uint64]) -> list[bytes]:
    """Rows of two numbers back as the sixteen bytes they are."""
    data = np.ascontiguousarray(pairs).tobytes()
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def halves(pairs: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Two numbers per row as two columns."""
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def packed(blob: Buffer, starts: Rows, sizes: Rows) -> Binary:
    """Pieces of a blob one behind the other, joined by stretches that already lie so."""
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise refuse("a batch of deltas holds at most 2 GiB", "payload", np.iinfo(np.int32).max)
    ends = starts + sizes
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    firsts = np.concatenate(([0], breaks)) if len(starts) else breaks
    lasts = np.concatenate((breaks, [len(starts)])) if len(starts) else breaks
    view = memoryview(blob)
    cuts = zip(starts[firsts].tolist(), ends[lasts - 1].tolist(), strict=True)
    pieces = [view[a:b] for a, b in cuts]
    return Binary(offsets.astype(np.int32), pieces[0] if len(pieces) == 1 else b"".join(pieces))


def joined(parts: list[Binary]) -> Binary:
    sizes = np.concatenate([np.diff(part.offsets).astype(np.int64) for part in parts])
    blob = b"".join([memoryview(p.blob)[p.offsets[0] : p.offsets[-1]] for p in parts])
    return packed(blob, np.concatenate(([0], np.cumsum(sizes)[:-1])), sizes)


def blank(count: int) -> Binary:
    return Binary(np.zeros(count + 1, np.int32), b"")


def groups(shapes: Rows) -> list[tuple[int, Rows]]:
    """Rows of equal shape together."""
    if not len(shapes):
        return []
    if (shapes == shapes[0]).all():
        return [(int(shapes[0]), np.arange(len(shapes)))]
    order = np.argsort(shapes, kind="stable")
    ranked = shapes[order]
    cuts = [0, *(np.flatnonzero(ranked[1:] != ranked[:-1]) + 1).tolist(), len(ranked)]
    return [(int(ranked[a]), order[a:b]) for a, b in pairwise(cuts)]
