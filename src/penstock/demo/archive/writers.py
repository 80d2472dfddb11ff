"""Who writes in the demo: four models that do not wait for each other, two editors, and somebody
who builds on a change that nobody ever made."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.demo.archive import films
from penstock.demo.archive.pipeline import EDITS, STILLS, Scale

if TYPE_CHECKING:
    from penstock.client.delta.deltas import Deltas
    from penstock.demo.archive.cinema import Cinema
    from penstock.demo.corpus import Corpus

MODELS: Final = 4
EDITORS: Final = ("ana", "ben")
STRANGER: Final = "nobody"
PARTITIONS: Final = {EDITS: 1, STILLS: 2}
CHUNK: Final = 1_000
PART_ENDS: Final = (0.15, 0.85)  # of the corpus: the first load, the bulk work; then a rest
EDIT_EVERY_S: Final = 0.2
ORPHAN: Final = "The Reel That Never Was"


def corpus_of(scale: Scale) -> Corpus:
    """The stills: 5 % duplicates, 20 % before their parent, 10 % concurrent, by four origins."""
    from penstock.demo.corpus import CorpusOptions, generate
    from penstock.model.delta import Op

    return generate(
        CorpusOptions(
            deltas=scale.deltas, vectors=scale.vectors, dimensions=films.DIMENSIONS,
            duplicates=0.05, disorder=0.2, concurrent=0.1, origins=MODELS,
            priorities=(0.0, 0.0, 0.0, 1.0), namespaces=(films.STILLS,),
            ops={Op.CREATE: 0.01, Op.SPARSE: 0.84, Op.DENSE: 0.05, Op.SCALE: 0.05, Op.OFFSET: 0.05},
            start_ms=time.time_ns() // 1_000_000, writes_per_ms=100, seed=1,
        )
    )  # fmt: skip


def in_parts(corpus: Corpus, shares: Sequence[float]) -> tuple[Corpus, list[int]]:
    """The corpus in parts that may be written with any time between them, and where they end.

    Nobody waits over the end of a part for a cause: a delta whose vector's earlier changes arrive
    in a later part arrives there too.
    """
    history, arrivals = corpus.history, corpus.arrivals
    cuts = [int(share * len(arrivals)) for share in shares]
    arrives = np.zeros(len(history), np.int64)
    arrives[arrivals[::-1]] = np.arange(len(arrivals))[::-1]
    part = np.searchsorted(cuts, arrives, side="right")
    order = np.argsort(history.vector, kind="stable")  # a vector's deltas as they were written
    base = history.vector[order] * (len(cuts) + 1)
    part[order] = np.maximum.accumulate(base + part[order]) - base
    sorted_arrivals = arrivals[np.argsort(part[arrivals], kind="stable")]
    ends = np.cumsum(np.bincount(part[arrivals], minlength=len(cuts) + 1)).tolist()
    return replace(corpus, arrivals=sorted_arrivals), ends


@dataclass(kw_only=True)
class Models:
    """Writes the corpus in order of arrival, with a fresh vector now and then to look out for."""

    house: Cinema
    corpus: Corpus
    ends: list[int]  # of the parts that are not written yet
    deltas: Deltas
    position: int = 0
    probes: int = 0

    async def write(self, *, within_s: float, probe: bool = False) -> None:
        """The next part, evenly over the time."""
        end = self.ends.pop(0)
        began, first = time.monotonic(), self.position
        pace = within_s / max(1, end - first)
        while self.position < end:
            size = min(CHUNK, end - self.position)
            await self._put(size)
            if probe:
                await self._probe()
            ahead = began + (self.position - first) * pace - time.monotonic()
            await asyncio.sleep(max(0.0, ahead))

    async def _put(self, size: int) -> None:
        from penstock.model.columns import Binary
        from penstock.model.ids import partitions_of_deltas

        chunk = await asyncio.to_thread(self.corpus.chunk, self.position, self.position + size)
        payloads = list(chunk.payloads)
        homes = partitions_of_deltas(payloads, PARTITIONS[STILLS])
        producer = await self.deltas.topic.open_producer()
        for partition in np.unique(homes).tolist():
            rows = [payloads[row] for row in np.flatnonzero(homes == partition).tolist()]
            await producer.put_payloads(Binary.of(rows), partition=partition)
        self.position += size
        self.house.wrote(STILLS, size)

    async def _probe(self) -> None:
        """A vector of its own: it is visible when it is there at all."""
        from penstock.model.delta import Op, PriorityClass

        self.probes += 1
        name = f"lookout-{self.probes:04d}"
        values = np.full((1, films.DIMENSIONS), 0.1, np.float32)
        await self.deltas.put_columns(
            [name], values, op=Op.CREATE, priority=PriorityClass.LOW, fresh=True
        )
        self.house.wrote(STILLS, 1)
        self.house.prober.expect((films.STILLS, name), revision=1, lane="LOW")


@dataclass(kw_only=True)
class Editors:
    """Two people who change the same films, each with an origin, at a steady pace."""

    house: Cinema
    hands: list[Deltas]
    revisions: dict[str, int] = field(default_factory=dict)
    edits: int = 0

    async def fill(self) -> None:
        """The catalogue as it was delivered."""
        for name in films.CATALOGUE:
            await self.hands[0].create(
                name, films.film_vector(name), metadata={"title": name, "filed_by": "model"}
            )
            self._count(name)

    async def edit_until(self, end: asyncio.Event) -> None:
        """Small corrections of the films' noise: they move nothing, but each is a change."""
        names = [name for name in films.CATALOGUE if name != films.MISFILED]
        for name, number in zip(itertools.cycle(names), itertools.count(), strict=False):
            if end.is_set():
                return
            await self.correct(name, {films.DIMENSIONS - 1 - number % 8: 0.001 * (number % 40)})
            await asyncio.sleep(EDIT_EVERY_S)

    async def correct(self, name: str, components: dict[int, float]) -> None:
        from penstock.model.delta import PriorityClass

        hand = self.hands[self.edits % len(self.hands)]
        await hand.set(name, components, priority=PriorityClass.CRITICAL)
        self.edits += 1
        self._count(name)
        self.house.prober.expect(
            (films.FILMS, name), revision=self.revisions[name], lane="CRITICAL"
        )

    def _count(self, name: str) -> None:
        self.revisions[name] = self.revisions.get(name, 0) + 1
        self.house.wrote(EDITS, 1)


async def put_an_orphan(house: Cinema, deltas: Deltas) -> bytes:
    """A change that follows one that was never written; the id that it asks for."""
    from penstock.client.delta.deltas import new_delta_id

    missing = new_delta_id()
    await deltas.set(ORPHAN, {0: 1.0}, parent=missing, clock={STRANGER: 1})
    house.wrote(EDITS, 1)
    return missing


def hand(house: Cinema, topic: str, *, origin: str, namespace: str) -> Deltas:
    return house.client.deltas(topic, origin=origin, namespace=namespace)


async def create_topics(house: Cinema) -> None:
    for topic, partitions in PARTITIONS.items():
        await house.client.call(
            "topic_create",
            config={
                "name": topic, "kind": "delta", "dimensions": films.DIMENSIONS,
                "partitions": partitions,
            },
        )  # fmt: skip
