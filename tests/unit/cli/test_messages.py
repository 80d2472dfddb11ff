from penstock.cli.messages import Attributes, body_of
from penstock.model.batch import SCHEMAS, Kind


def test_a_body_has_only_the_columns_it_needs() -> None:
    plain = SCHEMAS[Kind.ENQ].decode(body_of([b"a", b"b"], Attributes()), 2)
    assert "priority" not in plain
    assert list(plain.binary("payload") or ()) == [b"a", b"b"]
    full = Attributes(priority=3, key=b"k", delay_ms=5, headers={"h": "1"}, max_retries=0)
    columns = SCHEMAS[Kind.ENQ].decode(body_of([b"a"], full), 1)
    assert columns.fixed("priority").tolist() == [3]
    assert columns.fixed("delay_ms").tolist() == [5]
    assert columns.fixed("max_retries").tolist() == [0]
