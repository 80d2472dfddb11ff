"""Sinks that write to a topic, on a real node. No Spark is needed for it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.spark.conftest import RunningNode

from penstock.errors import InvalidArgument
from penstock.sinks.protocol import Items, TopicWriter
from penstock.spark.source.access import NodeTopicWriter


def items(*sequences: int) -> Items:
    payloads = [b"%d" % sequence for sequence in sequences]
    return Items(sequences=np.array(sequences), payloads=pa.array(payloads, pa.binary()))


def held(node: RunningNode, topic: str, partition: int = 0) -> list[bytes]:
    access = node.access()
    last = access.log_status(topic)[partition].readable
    found = [b for batches in access.read_range(topic, partition, 1, last) for b in batches]
    return [payload for batch in found for payload in batch.columns().binary("payload") or ()]


def test_what_is_appended_again_is_there_once(node: RunningNode) -> None:
    node.topic("notify", [])
    writer = NodeTopicWriter(node.access)
    assert isinstance(writer, TopicWriter)

    for chunk in ((1, 2, 5), (2, 5, 6), (1, 2, 5, 6, 7)):
        writer.append("notify", producer="p", epoch=1, items=items(*chunk), partition=0)

    assert held(node, "notify") == [b"1", b"2", b"5", b"6", b"7"]


def test_messages_go_to_the_sources_partition(node: RunningNode) -> None:
    node.topic("notify", [], partitions=2)
    writer = NodeTopicWriter(node.access)

    writer.append("notify", producer="p", epoch=1, items=items(1, 2), partition=3)

    assert held(node, "notify", 1) == [b"1", b"2"]
    assert held(node, "notify", 0) == []


def test_many_items_are_cut_to_the_limits(node: RunningNode) -> None:
    node.topic("notify", [])
    writer = NodeTopicWriter(node.access)
    numbers = np.arange(1, 25_001)
    many = Items(
        sequences=numbers,
        payloads=pa.array([b"x" * 500] * len(numbers), pa.binary()),
        priorities=numbers % 4,
        headers=pa.array([b"\x81\xa1a\xa1b", None] * (len(numbers) // 2), pa.binary()),
    )

    for _ in range(2):
        writer.append("notify", producer="p", epoch=1, items=many, partition=0)

    assert node.client.topic("notify").stats().ready == 25_000
    assert node.client.topic("notify").peek(1)[0].priority == 0


def test_what_the_node_refuses_is_told(node: RunningNode) -> None:
    node.topic("notify", [], payload_bytes_max=10)
    writer = NodeTopicWriter(node.access)
    large = Items(sequences=np.array([1]), payloads=pa.array([b"x" * 11], pa.binary()))

    with pytest.raises(InvalidArgument) as refused:
        writer.append("notify", producer="p", epoch=1, items=large, partition=0)

    assert refused.value.field == "payload"
