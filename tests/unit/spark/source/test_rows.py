"""Rows that Spark gets out of batches of the log."""

from __future__ import annotations

from penstock.model.batch import SCHEMAS, Kind, seal
from penstock.model.plain import UNREADABLE
from penstock.spark.source.rows import BatchPiece, RowSource, header_maps
from verification.malformed_maps import MALFORMED_MAPS


def test_headers_that_cannot_be_read_do_not_fail_the_rows_beside_them() -> None:
    """Before, the first of them was a DecodeError, and none of the rows could be had."""
    headers = [b"\x81\xa1a\xa1b", *MALFORMED_MAPS.values(), b""]
    count = len(headers)
    body = SCHEMAS[Kind.ENQ].encode(count, {"headers": headers, "payload": [b"x"] * count})
    batch = seal(
        Kind.ENQ, body, topic=1, partition=0, epoch=1, epoch_previous=1, first=1, count=count,
        time_ms=1, chain_previous=0,
    )  # fmt: skip
    found = header_maps(RowSource("t", [BatchPiece(batch, batch.columns(), 0, count)])).to_pylist()
    assert (found[0], found[-1]) == ([("a", "b")], None)
    assert [row[0][0] for row in found[1:-1]] == [UNREADABLE] * (count - 2)
