from penstock.cli.enqueue import Attributes, body_of, ids_of
from penstock.model.batch import SCHEMAS, Kind
from penstock.model.ids import MessageId
from penstock.wire.messages import Duplicate, Enqueued, Placed


def test_a_body_has_only_the_columns_it_needs() -> None:
    plain = SCHEMAS[Kind.ENQ].decode(body_of([b"a", b"b"], Attributes()), 2)
    assert "priority" not in plain
    assert list(plain.binary("payload") or ()) == [b"a", b"b"]
    full = Attributes(priority=3, key=b"k", delay_ms=5, headers={"h": "1"}, max_retries=0)
    columns = SCHEMAS[Kind.ENQ].decode(body_of([b"a"], full), 1)
    assert columns.fixed("priority").tolist() == [3]
    assert columns.fixed("delay_ms").tolist() == [5]
    assert columns.fixed("max_retries").tolist() == [0]


def test_ids_come_back_in_the_order_of_the_request() -> None:
    answer = Enqueued(7, [Placed(1, 2, 0, 10, 99)], [Duplicate(0, 3, 4, 50)])
    ids = [MessageId.parse(text) for text in ids_of(answer, 3)]
    assert ids == [MessageId(50, 7, 3, 4), MessageId(99, 7, 0, 10), MessageId(99, 7, 0, 11)]
