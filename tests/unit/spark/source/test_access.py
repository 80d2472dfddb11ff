"""Which batches of a range hold messages that exist."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import LimitExceeded
from penstock.model.batch import SCHEMAS, Batch, Kind, seal
from penstock.spark.source import access
from penstock.spark.source.access import Decisions


class Log:
    """Batches that follow each other."""

    def __init__(self) -> None:
        self.next = 1

    def add(self, kind: Kind, columns: dict[str, Any], count: int = 1) -> Batch:
        body = SCHEMAS[kind].encode(count, columns)
        batch = seal(
            kind, body, topic=1, partition=0, epoch=1, epoch_previous=1, first=self.next,
            count=count, time_ms=1, chain_previous=0,
        )  # fmt: skip
        self.next += count
        return batch

    def enq(self) -> Batch:
        return self.add(Kind.ENQ, {"payload": [b"x"]})

    def prepare(self, transaction: bytes) -> Batch:
        values = {"payload": [b"x"], "transaction": [transaction], "home": [0]}
        return self.add(Kind.PREPARE, values)

    def decide(self, transaction: bytes, commit: int = 1) -> Batch:
        return self.add(Kind.DECIDE, {"transaction": [transaction], "commit": [commit]})


def test_other_kinds_are_left_out() -> None:
    log = Log()
    batches = [log.enq(), log.add(Kind.ACK, {"token": [1]}), log.enq()]
    assert Decisions(9).feed(batches) == [batches[0], batches[2]]


def test_what_stands_behind_an_undecided_one_waits() -> None:
    log, found = Log(), Decisions(9)
    first, held, behind = log.enq(), log.prepare(b"t"), log.enq()
    assert found.feed([first, held, behind]) == [first]
    assert found.open
    assert found.feed([log.decide(b"t")]) == [held, behind]
    assert not found.open


def test_one_decided_against_is_left_out() -> None:
    log, found = Log(), Decisions(9)
    held, behind = log.prepare(b"t"), log.enq()
    assert found.feed([held, behind, log.decide(b"t", 0), log.decide(b"t", 1)]) == [behind]


def test_each_waits_for_its_own_decision() -> None:
    log, found = Log(), Decisions(9)
    one, two = log.prepare(b"1"), log.prepare(b"2")
    assert found.feed([one, two, log.decide(b"2")]) == []
    assert found.feed([log.decide(b"1")]) == [one, two]


def test_past_the_end_only_decisions_count() -> None:
    log = Log()
    held = log.prepare(b"t")
    found = Decisions(held.last)
    assert found.feed([held, log.enq(), log.prepare(b"u"), log.decide(b"t")]) == [held]
    assert not found.open


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "HELD_BYTES_MAX", 500)
    log, found = Log(), Decisions(99)
    with pytest.raises(LimitExceeded):
        found.feed([log.prepare(b"t"), *[log.enq() for _ in range(10)]])
