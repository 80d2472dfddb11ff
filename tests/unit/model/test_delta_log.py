import numpy as np

from penstock.client.delta_columns import DeltaColumns, Names, encode_columns
from penstock.client.delta_heads import Heads, HybridClock
from penstock.model.batch import SCHEMAS, Batch, Kind, seal
from penstock.model.columns import Binary
from penstock.model.delta_log import deltas_of


def payloads(count: int) -> Binary:
    columns = DeltaColumns(vector_ids=["v"] * count, values=np.ones((count, 2), "f4")).checked()
    names = Names.of("n", columns.vector_ids)
    causes = Heads(b"w").chain(names, HybridClock())
    return encode_columns(columns, names, causes, origin=b"w", rows=np.arange(count))


def batch(first: int, count: int, *, kind: Kind = Kind.ENQ, **columns: object) -> Batch:
    body = SCHEMAS[kind].encode(count, columns)  # type: ignore[arg-type]
    return seal(
        kind, body, topic=1, partition=0, epoch=1, epoch_previous=1, first=first, count=count,
        time_ms=1000 + first, chain_previous=0,
    )  # fmt: skip


def test_deltas_stand_where_the_log_has_them() -> None:
    found = deltas_of(
        [
            batch(1, 1, kind=Kind.BARRIER, node=[b"n"]),
            batch(2, 3, payload=payloads(3)),
            batch(5, 1, kind=Kind.CONFIG, config=[b""]),
            batch(6, 2, payload=payloads(2), headers=[b"\x81\xa1a\x01", b""]),
        ]
    )
    assert found.sequences.tolist() == [2, 3, 4, 6, 7]
    assert found.log_times_ms.tolist() == [1002, 1002, 1002, 1006, 1006]
    assert found.counter.tolist() == [1, 2, 3, 1, 2]
    assert found.headers is not None
    assert found.headers.tolist() == [b"", b"", b"", b"\x81\xa1a\x01", b""]


def test_a_log_without_deltas_has_none() -> None:
    assert len(deltas_of([batch(1, 1, kind=Kind.BARRIER, node=[b"n"])])) == 0
    assert len(deltas_of([])) == 0
