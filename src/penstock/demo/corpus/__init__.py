"""A seeded corpus of deltas: several writers, concurrent changes, late parents, duplicates.

The corpus first *writes* a history (`history`): who changed which vector, having seen what. Then it
decides in which order the deltas *arrive*. A share of them arrives before its parent, by at most
`window` places, and a share arrives twice. Everything is a function of the options, in columns: a
million deltas take a few seconds.

    corpus = generate(CorpusOptions(deltas=60_000, duplicates=0.05, disorder=0.2, concurrent=0.1))
    for chunk in corpus.chunks(5_000):
        await deltas.put_columns(chunk.payloads)

What the deltas add up to is left to the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.demo.corpus.history import History, HistoryOptions, write
from penstock.demo.corpus.payloads import Encoder, names_of
from penstock.errors import InvalidArgument
from penstock.model.columns import Binary
from penstock.model.delta import DIMENSIONS_MAX, Op

SPARSE_ONLY: Final[Mapping[Op, float]] = {Op.SPARSE: 1.0}
# A vector begins with CREATE wherever CREATE is among the operations; its weight is for others.
ALL_OPS: Final[Mapping[Op, float]] = {
    Op.CREATE: 0.01,
    Op.DENSE: 0.03,
    Op.SPARSE: 0.7,
    Op.SCALE: 0.06,
    Op.OFFSET: 0.1,
    Op.DELETE: 0.02,
    Op.METADATA: 0.08,
}
DISORDER_MAX: Final = 0.25  # a delta before its parent needs a parent that is in its place


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """Shares are of 1: `duplicates` of all rows, the others of the distinct deltas."""

    deltas: int = 1_000_000  # rows, duplicates included
    vectors: int = 100_000
    dimensions: int = 128
    components: int = 10  # of a SPARSE or OFFSET delta
    duplicates: float = 0.0
    disorder: float = 0.0  # arrive before their parent
    concurrent: float = 0.0  # written without having seen the one before
    origins: int = 4
    window: int = 1000  # places from an early child to its parent, from a delta to its duplicate
    priorities: tuple[float, float, float, float] = (0.01, 0.09, 0.7, 0.2)
    ops: Mapping[Op, float] = field(default_factory=lambda: SPARSE_ONLY)
    namespaces: tuple[str, ...] = ("default",)
    start_ms: int = 1_767_225_600_000  # the time of the first write
    writes_per_ms: int = 10
    seed: int = 0

    def validate(self) -> None:
        bounds = {
            "deltas": (1, 1 << 31),
            "vectors": (1, 1 << 31),
            "dimensions": (1, DIMENSIONS_MAX),
            "components": (1, self.dimensions),
            "duplicates": (0, 0.9),
            "disorder": (0, DISORDER_MAX),
            "concurrent": (0, 1),
            "origins": (1, 32),
            "window": (1, 1 << 31),
            "writes_per_ms": (1, 1 << 16),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidArgument(
                    f"{name} is {value}, not within {low} and {high}", field=name, limit=high
                )


@dataclass(frozen=True)
class Chunk:
    """A stretch of arrivals: one encoded payload each, and which delta and vector it is."""

    payloads: Binary
    deltas: NDArray[np.int64]  # index into the corpus's history
    vectors: NDArray[np.int64]
    priorities: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.deltas)


@dataclass(frozen=True)
class Corpus:
    """`history` in the order of writing, `arrivals` (indices into it) in the order of the log."""

    options: CorpusOptions
    history: History
    arrivals: NDArray[np.int64]
    early: int  # deltas that arrive before their parent
    encoder: Encoder

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def facts(self) -> dict[str, int]:
        """What is in it, in numbers."""
        return {
            "rows": len(self.arrivals),
            "deltas": len(self.history),
            "duplicates": len(self.arrivals) - len(self.history),
            "early": self.early,
            "concurrent": self.history.concurrent,
            "vectors": len(np.unique(self.history.vector)),
            "origins": self.options.origins,
        }

    def name_of(self, vector: int) -> tuple[str, str]:
        """The namespace and id of a vector."""
        return names_of(self.options.namespaces, vector)

    def chunk(self, first: int, end: int) -> Chunk:
        """The arrivals `first` to `end`, encoded."""
        rows = self.arrivals[first:end]
        history = self.history
        payloads = Binary.of(self.encoder.payloads(rows))
        return Chunk(payloads, rows, history.vector[rows], history.priority[rows])

    def chunks(self, size: int = 10_000) -> Iterator[Chunk]:
        for first in range(0, len(self), size):
            yield self.chunk(first, first + size)


def generate(options: CorpusOptions) -> Corpus:
    """The corpus that `options` describe; the same options give the same bytes."""
    options.validate()
    rng = np.random.default_rng(options.seed)
    distinct = max(1, round(options.deltas * (1 - options.duplicates)))
    history = write(
        rng,
        HistoryOptions(
            deltas=distinct,
            vectors=options.vectors,
            origins=options.origins,
            concurrent=options.concurrent,
            ops=options.ops,
            priorities=options.priorities,
            start_ms=options.start_ms,
            writes_per_ms=options.writes_per_ms,
        ),
    )
    places, early = _places(rng, history, options)
    arrivals = _with_duplicates(rng, places, options)
    encoder = Encoder(
        history,
        rng=rng,
        dimensions=options.dimensions,
        components=options.components,
        namespaces=options.namespaces,
    )
    return Corpus(options, history, arrivals, early, encoder)


def _places(
    rng: np.random.Generator, history: History, options: CorpusOptions
) -> tuple[NDArray[np.float64], int]:
    """Where each delta arrives: in its place, or up to `window` places before its parent.

    A parent of such a delta keeps its own place, so that nothing waits for longer than that.
    """
    places = np.arange(len(history), dtype=np.float64)
    parent = history.parent
    share = options.disorder * len(history) / max(1, int(np.count_nonzero(parent >= 0)))
    # Of the deltas drawn at rate q, those whose parent was drawn too are taken back: q (1 - q).
    draw = 0.5 - np.sqrt(0.25 - min(share, DISORDER_MAX))
    drawn = (rng.random(len(history)) < draw) & (parent >= 0)
    early = rng.permutation(np.flatnonzero(drawn & ~drawn[parent]))
    early = early[: round(options.disorder * len(history))]
    places[early] = parent[early] - rng.uniform(0.25, options.window, len(early))
    return places, len(early)


def _with_duplicates(
    rng: np.random.Generator, places: NDArray[np.float64], options: CorpusOptions
) -> NDArray[np.int64]:
    """The order of arrival, in which some deltas come a second time within the window."""
    distinct = len(places)
    again = rng.integers(0, distinct, options.deltas - distinct)
    later = places[again] + rng.uniform(0.5, options.window, len(again))
    order = np.argsort(np.concatenate([places, later]), kind="stable")
    arrivals: NDArray[np.int64] = np.concatenate([np.arange(distinct), again])[order]
    return arrivals
