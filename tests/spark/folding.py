"""Deltas for the tests of what is folded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from tests.spark.conftest import RunningNode

from penstock.demo.corpus import Corpus
from penstock.model.delta import Delta, Op, encode
from penstock.sinks.protocol import Items
from penstock.spark.source.access import NodeTopicWriter

DIMENSIONS = 8


def delta_topic(
    node: RunningNode, name: str = "vectors", *, dimensions: int = DIMENSIONS, **config: Any
) -> None:
    made = {"name": name, "kind": "delta", "dimensions": dimensions, **config}
    node.access().call("topic_create", config=made)


def put(node: RunningNode, corpus: Corpus, first: int, last: int, topic: str = "vectors") -> None:
    """Append the corpus' arrivals from `first` on, in small batches."""
    for at in range(first, last, 100):
        chunk = corpus.chunk(at, min(at + 100, last))
        put_payloads(node, chunk.payloads.tolist(), at=at, topic=topic)


def put_payloads(
    node: RunningNode, payloads: list[bytes], *, at: int = 0, topic: str = "vectors"
) -> None:
    numbers = np.arange(at + 1, at + 1 + len(payloads))
    items = Items(sequences=numbers, payloads=pa.array(payloads, pa.binary()))
    writer = NodeTopicWriter(node.access)
    writer.append(topic, producer="corpus", epoch=1, items=items, partition=0)


def delta(number: int, vector: str, op: Op = Op.SPARSE, **more: Any) -> bytes:
    """A delta of four dimensions, the `number`th of its writer for the vector."""
    given: dict[str, Any] = {"values": [float(number)], "indices": [number % 4]}
    if op is Op.CREATE:
        given = {"values": [float(number)] * 4}
    if op in (Op.DELETE, Op.METADATA):
        given = {}
    made = Delta(
        delta_id=f"{vector}-{number}".encode().rjust(16, b"."), namespace="a", vector_id=vector,
        op=op, origin="me", time=number << 16, clock={"me": number}, **{**given, **more},
    )  # fmt: skip
    return encode(made, dimensions=4)
