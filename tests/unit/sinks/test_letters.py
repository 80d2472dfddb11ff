"""Letters: payloads, headers, producer keys."""

from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from tests.unit.spark.delivery.delivering import PIPELINE, FileTopics, delta

from penstock.model.columns import Binary
from penstock.model.delta import Delta, Op, PriorityClass, Source, decode, encode
from penstock.model.delta_batch import DeltaBatch
from penstock.model.entries import HEADERS_BYTES_MAX
from penstock.model.plain import HEADERS_VALUES_MAX
from penstock.sinks.schema import DELTAS, deltas_table
from penstock.sinks.texts import json_of
from penstock.sinks.topics import LetterBox, headers_of, payloads_of
from verification.malformed_maps import MALFORMED_MAPS

COMMON = {"namespace": "default", "topic": "vectors", "log_time_ms": 1}


def post(topics: FileTopics, *rows: dict[str, object], purpose: str = "dlq-x") -> None:
    box = LetterBox(writer=topics, create=topics.create)
    table = pa.Table.from_pylist(list(rows), DELTAS)
    reasons = [{"penstock-reason": "because"}] * len(rows)
    box.post(table, to=str.upper, pipeline=PIPELINE, purpose=purpose, reasons=reasons)


def test_a_letter_is_written_once_per_purpose_and_source(tmp_path: Path) -> None:
    topics = FileTopics(tmp_path / "topics.lines")
    row = delta(7, "a", 1, 2, **COMMON)
    other = row | {"partition": 1}
    for _ in range(2):
        post(topics, row, other)
        post(topics, row, purpose="dlq-y")
    found = topics.messages("VECTORS")
    assert [m["n"] for m in found] == [7, 7, 7]
    assert len({m["producer"] for m in found}) == 3


def test_headers_of_the_delta_stay_beside_those_of_the_letter(tmp_path: Path) -> None:
    topics = FileTopics(tmp_path / "topics.lines")
    given = {"team": "search", "penstock-reason": "that of the last time", "penstock-missing": "ff"}
    post(topics, delta(1, "a", 1, 2, headers=given, **COMMON))
    headers = topics.messages("VECTORS")[0]["headers"]
    assert headers["team"] == "search"
    assert headers["penstock-reason"] == "because"
    assert "penstock-missing" not in headers


def test_headers_that_would_not_fit_are_left_out_and_said_so(tmp_path: Path) -> None:
    topics = FileTopics(tmp_path / "topics.lines")
    post(topics, delta(1, "a", 1, 2, headers={"x": "y" * (HEADERS_BYTES_MAX - 10)}, **COMMON))
    headers = topics.messages("VECTORS")[0]["headers"]
    assert headers["penstock-headers"] == "left out: too large"
    assert headers["penstock-reason"] == "because"


def test_payloads_that_the_file_lacks_are_encoded_again() -> None:
    """Every operation comes out meaning what it meant; where indices were given, to the byte."""
    shapes = {
        Op.CREATE: (None, [1.0, 2.0], {"k": 1}), Op.DENSE: (None, [0.5, 0.25], None),
        Op.SPARSE: ([1], [2.0], None), Op.SCALE: (None, [3.0], None),
        Op.OFFSET: ([0, 1], [1.0, 1.0], None), Op.DELETE: (None, None, None),
        Op.METADATA: (None, None, {"k": [1, 2]}),
    }  # fmt: skip
    deltas = [
        Delta(
            delta_id=bytes([op + 1] * 16), parent=b"p" * 16, namespace="ns", vector_id="v", op=op,
            origin="o", time=op + 5, clock={"o": 2, "other": 1}, metadata=metadata,
            indices=None if indices is None else np.array(indices, np.uint16),
            values=None if values is None else np.array(values, np.float32),
            priority=PriorityClass.HIGH, source=Source.IMPORT,
        )
        for op, (indices, values, metadata) in shapes.items()
    ]  # fmt: skip
    payloads = [encode(one, dimensions=2) for one in deltas]
    numbers = np.arange(1, len(deltas) + 1)
    batch = DeltaBatch.of(
        Binary.of(payloads), sequences=numbers.astype(np.uint64), log_times_ms=numbers
    )
    table = deltas_table(
        batch, positions=batch.sequences, ordinals=batch.sequences, topic="t", partition=0
    )
    found = payloads_of(table).to_pylist()
    assert [decode(payload) for payload in found] == deltas
    assert found == payloads
    assert table["clock"][0].as_py() == '{"o":2,"other":1}'


def test_headers_that_cannot_be_read_do_not_keep_a_letter(tmp_path: Path) -> None:
    """Before, the letter could not be written: it was a DecodeError."""
    topics = FileTopics(tmp_path / "topics.lines")
    many = msgspec.msgpack.encode({str(i): i for i in range(HEADERS_VALUES_MAX)})
    rows = [*MALFORMED_MAPS.values(), many]
    for n, packed in enumerate(rows, 1):
        row = delta(n, "a", 1, 2, payload=True, **COMMON)
        original = msgspec.msgpack.encode((row["payload"], packed))
        post(topics, row | {"headers": json_of(packed).decode(), "original": original})
    found = [message["headers"] for message in topics.messages("VECTORS")]
    assert len(found) == len(rows)
    assert all(headers["penstock-reason"] == "because" for headers in found)
    assert "penstock-headers" in found[-1]  # with ours it would have been more than a message takes


ODD_MAPS = {
    "bytes": {"a": b"\xff\0", "b": [b"text"]},
    "not finite": {"a": float("nan"), "b": [float("inf"), -float("inf")]},
    "short float": msgspec.Raw(b"\x81\xa1a\xca\x3d\xcc\xcc\xcd"),
    "long integer": msgspec.Raw(b"\x81\xa1a\xcd\x00\x05"),
    "name twice": msgspec.Raw(b"\x82\xa1a\x01\xa1a\x02"),
}
PLAIN_MAPS = {
    "scalars": {"t": 'é\0"', "f": 0.1, "i": -5, "big": 2**64 - 1, "no": None, "yes": True},
    "nested": {"a": {"b": [1, {"c": []}, 1.0, -0.0]}, "b": {}},
    "empty": {},
}


@pytest.mark.parametrize("name", [*ODD_MAPS, *PLAIN_MAPS])
def test_a_delta_comes_out_of_a_table_to_the_byte(name: str) -> None:
    """A table says metadata and headers as JSON; what that cannot say is kept beside it."""
    packed = msgspec.msgpack.encode((ODD_MAPS | PLAIN_MAPS)[name])
    made = Delta(
        delta_id=b"i" * 16, namespace="ns", vector_id="v", op=Op.CREATE, origin="o", time=5,
        clock={"o": 2}, values=np.array([1, 2], np.float32), metadata=msgspec.Raw(packed),
    )  # fmt: skip
    payload = encode(made, dimensions=2)
    batch = DeltaBatch.of([payload, payload], headers=Binary.of([packed, b""]))
    table = deltas_table(
        batch, positions=batch.sequences, ordinals=batch.sequences, topic="t", partition=0
    )
    assert table["original"].null_count == (0 if name in ODD_MAPS else 2)
    assert payloads_of(table).to_pylist() == [payload, payload]
    assert headers_of(table).to_pylist() == [packed, None]
