import msgspec
import numpy as np

from penstock.cli.messages import line_of, rows_of
from penstock.model.batch import SCHEMAS, Batch, Kind, seal
from penstock.model.ids import MessageId
from penstock.model.plain import UNREADABLE
from verification.malformed_maps import MALFORMED_MAPS


def batch(kind: Kind, count: int, **columns: object) -> Batch:
    body = SCHEMAS[kind].encode(count, columns)  # type: ignore[arg-type]
    return seal(
        kind, body, topic=1, partition=2, epoch=3, epoch_previous=3, first=10, count=count,
        time_ms=1000, chain_previous=0,
    )  # fmt: skip


def test_messages_come_with_id_headers_and_payload() -> None:
    headers = [msgspec.msgpack.encode({"a": "1"}), b""]
    rows = list(rows_of(batch(Kind.ENQ, 2, payload=[b"x", b"y"], headers=headers, priority=[5, 6])))
    assert [row["sequence"] for row in rows] == [10, 11]
    assert rows[0]["headers"] == {"a": "1"}
    assert rows[1]["headers"] == {}
    assert MessageId.parse(rows[1]["message_id"]) == MessageId(1000, 1, 2, 11)
    assert "p=6" in line_of(rows[1])


def test_other_kinds_show_their_own_columns() -> None:
    (row,) = rows_of(batch(Kind.ACK, 1, token=np.array([7], np.uint64)))
    assert (row["kind"], row["token"]) == ("ack", 7)
    assert "token=7" in line_of(row)


def test_headers_that_cannot_be_read_do_not_end_the_tail() -> None:
    """Before, the tail ended with a DecodeError at the first of them."""
    headers = list(MALFORMED_MAPS.values())
    rows = list(
        rows_of(batch(Kind.ENQ, len(headers), payload=[b"x"] * len(headers), headers=headers))
    )
    assert [set(row["headers"]) for row in rows] == [{UNREADABLE}] * len(headers)
