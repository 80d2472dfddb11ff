"""What another node may tell of the messages that it has."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import Corruption
from penstock.model.topic import TopicConfig
from penstock.node.serve.rounds import Supply
from penstock.wire.messages import Heads, LeaseAt, LeasesHeld, Order, SupplyHead, Taken, pack


class Peer:
    def open(self, control: Any, stream: Any) -> int:
        return 1

    def send(self, *frame: Any) -> None:
        return


class Rounds:
    """It hears of everything, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *told: None


def supply() -> Supply:
    """One that was asked for a message of one consumer."""
    jobs = TopicConfig(name="jobs", id=1)
    made = Supply("b", Peer(), topic=jobs, consumers=b"a/", rounds=Rounds())  # type: ignore[arg-type]
    made.lease(LeaseAt(1, [Order(b"a/1", 1000, 1, [0], [1], [5], [9])]))
    return made


SOUND = [
    (Heads(1, 0, [SupplyHead(0, 2, False, 9)]), bytes(16)),
    (Taken(1, 1, [1], False), b""),
    (LeasesHeld([b"a/1"], [1]), b""),
]
UNSOUND = [
    (Heads(1, 0, [SupplyHead(0, 2, False, 9)]), bytes(8)),
    (Heads(1, 0, [SupplyHead(0, -1, False, 9), SupplyHead(1, 2, False, 9)]), bytes(8)),
    (Heads(1, 0, []), bytes(3)),
    (Taken(1, 1, [], False), b""),
    (LeasesHeld([b"a/1"], []), b""),
]


@pytest.mark.parametrize(("message", "data"), SOUND)
def test_what_fits_is_taken(message: Any, data: bytes) -> None:
    supply().on_batch(memoryview(pack(message) + data))


@pytest.mark.parametrize(("message", "data"), UNSOUND)
def test_what_cannot_be_ends_the_connection(message: Any, data: bytes) -> None:
    with pytest.raises(Corruption, match="cannot be"):
        supply().on_batch(memoryview(pack(message) + data))


def test_an_answer_that_nobody_asked_for_is_none() -> None:
    asked = supply()
    asked.on_batch(memoryview(pack(Taken(1, 1, [1], False))))
    with pytest.raises(Corruption):
        asked.on_batch(memoryview(pack(Taken(1, 1, [1], False))))
