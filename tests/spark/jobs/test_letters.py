"""Deltas that were set aside go back to their topic, each once."""

from __future__ import annotations

import pytest
from tests.spark.conftest import RunningNode
from tests.spark.jobs.support import MIXED, make_topic, mixed

from penstock.client.queue.entries import Item
from penstock.errors import FailedPrecondition
from penstock.model.batch import Batch
from penstock.spark.jobs.letters import replay_letters

PAYLOADS = mixed().chunk(0, 20).payloads.tolist()


def post(node: RunningNode, headers: dict[str, str]) -> None:
    make_topic(node, "vectors", dimensions=MIXED.dimensions, partitions=1)
    queue = node.client.topic("vectors-quarantine", partitions=2)
    queue.put_many([Item(payload, headers=headers, priority=1) for payload in PAYLOADS])


def back(node: RunningNode, topic: str | None = None) -> dict[str, object]:
    return replay_letters(node.access(), "vectors-quarantine", topic=topic)


def held(node: RunningNode) -> list[Batch]:
    access = node.access()
    last = access.log_status("vectors")[0].readable
    return [b for batches in access.read_range("vectors", 0, 1, last) for b in batches]


def test_letters_go_back_where_they_came_from(node: RunningNode) -> None:
    post(node, {"penstock-topic": "vectors", "penstock-reason": "parent missing", "own": "kept"})
    assert back(node)["replayed"] == len(PAYLOADS)
    columns = [batch.columns() for batch in held(node)]
    found = [payload for one in columns for payload in one.binary("payload") or ()]
    assert sorted(found) == sorted(PAYLOADS)
    headers = {cell for one in columns for cell in one.binary("headers") or ()}
    assert headers == {b"\x81\xa3own\xa4kept"}
    assert back(node)["replayed"] == 0


def test_letters_that_do_not_say_where_from_need_a_topic(node: RunningNode) -> None:
    post(node, {"note": "nothing"})
    with pytest.raises(FailedPrecondition, match="--topic"):
        back(node)
    assert not held(node)
