"""A log is proved: whole, in order, chained. Each way of damaging it is told with its sequence."""

import msgspec
import pytest

from penstock.errors import Corruption
from penstock.model.batch import SCHEMAS, Batch, Kind, seal
from penstock.spark.jobs.log_fold import LogCheck


def batches(count: int) -> list[Batch]:
    found: list[Batch] = []
    first, chain = 1, 0
    for n in range(count):
        body = SCHEMAS[Kind.ENQ].encode(2, {"payload": [b"a", b"%d" % n]})
        found.append(
            seal(Kind.ENQ, body, topic=1, partition=0, epoch=1, epoch_previous=1, first=first,
                 count=2, time_ms=n, chain_previous=chain)
        )  # fmt: skip
        first, chain = first + 2, found[-1].chain
    return found


def test_a_whole_log_is_counted() -> None:
    check = LogCheck(first=1)
    check.feed(batches(3))
    assert (check.next, check.batches, check.messages) == (7, 3, 6)


def test_a_log_that_retention_has_cut_is_proved_from_its_first_batch() -> None:
    check = LogCheck(first=3)
    check.feed(batches(4)[1:])
    assert check.next == 9


def damaged(log: list[Batch], how: str) -> list[Batch]:
    if how == "gap":
        return [log[0], *log[2:]]
    if how == "twice":
        return [log[0], log[0], *log[1:]]
    if how == "crc":
        body = bytes(log[1].body).replace(b"a1", b"a2")
        return [log[0], msgspec.structs.replace(log[1], body=body), *log[2:]]
    other = SCHEMAS[Kind.ENQ].encode(2, {"payload": [b"x", b"y"]})
    forged = seal(Kind.ENQ, other, topic=1, partition=0, epoch=1, epoch_previous=1, first=3,
                  count=2, time_ms=1, chain_previous=0)  # fmt: skip
    return [log[0], forged, *log[2:]]


@pytest.mark.parametrize(
    ("how", "words"),
    [("gap", "missing"), ("twice", "missing"), ("crc", "CRC"), ("forged", "chain")],
)
def test_damage_is_told_with_its_sequence(how: str, words: str) -> None:
    with pytest.raises(Corruption, match=words) as found:
        LogCheck(first=1).feed(damaged(batches(4), how))
    assert found.value.details["sequence"] == 3
