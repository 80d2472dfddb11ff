"""What a notice says."""

import msgspec
from tests.conformance.sinks.changes import delta, deltas

from penstock.model.delta import Op
from penstock.sinks.notify import Notice, notices


def test_a_notice_names_the_change_not_its_values() -> None:
    table = deltas(8, delta(6), delta(7, vector_id="b", op=Op.SCALE, indices=None), partition=2)
    found = notices(table)
    first, second = (msgspec.msgpack.decode(p.as_py(), type=Notice) for p in found.payloads)
    assert first == Notice(
        topic="vectors",
        partition=2,
        sequence=8,
        ordinal=8,
        namespace="default",
        vector_id="a",
        op="sparse",
        delta_id=(6).to_bytes(16, "big"),
        origin="writer",
        time=table["time"][0].as_py(),
    )
    assert (second.op, second.vector_id) == ("scale", "b")
    assert found.sequences.tolist() == [8, 9]
    assert found.priorities is not None
    assert found.priorities.tolist() == [2, 3]
