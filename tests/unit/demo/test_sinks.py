"""The demo's own sinks keep the rules of the sink protocol."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.demo.archive.sinks import Partner, Shop, SqliteSink
from penstock.errors import Unavailable
from penstock.sinks.protocol import Sink, Work
from penstock.sinks.schema import states_schema

DIMENSIONS = 3


def work(*rows: tuple[str, int, bool], trigger: int = 0) -> Work:
    """States of vectors: id, revision, deleted. The values are the revision."""
    schema = states_schema(DIMENSIONS)
    columns: dict[str, Any] = {
        "namespace": ["films"] * len(rows),
        "vector_id": [name for name, _, _ in rows],
        "vector": pa.FixedSizeListArray.from_arrays(
            pa.array(np.repeat([float(r) for _, r, _ in rows], DIMENSIONS), pa.float32()),
            DIMENSIONS,
        ),
        "metadata": ["{}"] * len(rows),
        "deleted": [deleted for _, _, deleted in rows],
        "revision": [revision for _, revision, _ in rows],
        "topic": ["edits"] * len(rows),
    }
    for field in schema:
        columns.setdefault(field.name, [0] * len(rows))
    states = pa.table([columns[name] for name in schema.names], schema=schema)
    return Work(pipeline="p", first=trigger, last=trigger, states=states)


def held(sink: Sink) -> dict[str, tuple[int, list[float]]]:
    rows = [row for batch in sink.scan() for row in batch.to_pylist()]
    return {row["vector_id"]: (row["revision"], row["vector"]) for row in rows}


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[SqliteSink]:
    made = SqliteSink("store", path=str(tmp_path / "deep" / "store.sqlite"))
    made.open()
    yield made
    made.close()


def test_it_is_a_sink(sink: SqliteSink) -> None:
    assert isinstance(sink, Sink)


def test_a_resend_and_an_older_state_change_nothing(sink: SqliteSink) -> None:
    sink.write(work(("a", 2, False), ("b", 1, False)))
    sink.write(work(("a", 1, False), ("b", 1, False)))
    assert held(sink) == {"a": (2, [2.0] * 3), "b": (1, [1.0] * 3)}


def test_a_late_state_does_not_bring_a_deleted_vector_back(sink: SqliteSink) -> None:
    sink.write(work(("a", 2, True)))
    sink.write(work(("a", 1, False)))
    assert held(sink) == {}
    sink.write(work(("a", 3, False)))
    assert list(held(sink)) == ["a"]


def test_reset_empties_it_and_a_slice_is_written_as_what_it_is(sink: SqliteSink) -> None:
    sink.write(work(("a", 1, False)))
    sink.reset()
    whole = work(("a", 4, False), ("b", 5, False), ("c", 6, False))
    assert whole.states is not None
    sink.write(Work(pipeline="p", first=1, last=1, states=whole.states.slice(1, 1)))
    assert held(sink) == {"b": (5, [5.0] * 3)}


def test_what_was_written_is_there_for_the_next_to_open_it(tmp_path: Path) -> None:
    for revision in (1, 2):
        sink = SqliteSink("store", path=str(tmp_path / "store.sqlite"))
        sink.open()
        assert len(held(sink)) == revision - 1
        sink.write(work(("a", revision, False)))
        sink.close()


def test_the_shop_fails_during_its_outage_alone(tmp_path: Path) -> None:
    outage = tmp_path / "outage"
    shop = Shop("shop", path=str(tmp_path / "shop.sqlite"), outage=str(outage))
    shop.open()
    outage.touch()
    with pytest.raises(Unavailable, match="closed"):
        shop.write(work(("a", 1, False)))
    outage.unlink()
    shop.write(work(("a", 1, False)))
    assert list(held(shop)) == ["a"]
    shop.close()


def test_the_partner_takes_its_time(tmp_path: Path) -> None:
    partner = Partner("partner", path=str(tmp_path / "partner.sqlite"), rows_per_s=20.0)
    partner.open()
    began = time.monotonic()
    partner.write(work(("a", 1, False), ("b", 1, False)))
    assert time.monotonic() - began >= 0.1
    partner.close()
