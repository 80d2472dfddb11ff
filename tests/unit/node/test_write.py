"""ENQ bodies: limits are named, merging and taking apart lose nothing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.model.columns import Columns
from penstock.model.entries import BATCH_ENTRIES_MAX, DELAY_MS_MAX, ENQ
from penstock.model.ids import partition_of
from penstock.model.topic import TopicConfig
from penstock.node.write import (
    check_body,
    homes_of_entries,
    merge,
    producer_entries,
    subset,
)

CONFIG = TopicConfig(name="t", payload_bytes_max=100)


def body(payloads: Sequence[bytes], **columns: Any) -> bytes:
    return ENQ.encode(len(payloads), {"payload": list(payloads), **columns})


def produced(count: int, producer: bytes = b"p", sequence: int = 0) -> Columns:
    raw = ENQ.encode(
        count,
        {
            "payload": [b"%d" % i for i in range(count)],
            "run_count": [count],
            "run_epoch": [1],
            "run_sequence": [sequence],
            "run_producer": [producer],
        },
        runs=1,
    )
    return ENQ.decode(raw, count)


def rows(columns: Columns) -> list[tuple[int, bytes, bytes]]:
    keys, payloads = columns.binary("key"), columns.binary("payload")
    return [
        (
            int(columns.fixed("priority")[i]),
            b"" if keys is None else keys[i],
            b"" if payloads is None else payloads[i],
        )
        for i in range(columns.count)
    ]


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"payload": [b"x" * 101]}, "payload"),
        ({"payload": [b""], "key": [b"k" * 1025]}, "key"),
        ({"payload": [b""], "headers": [b"h" * 16385]}, "headers"),
        ({"payload": [b""], "delay_ms": [-1]}, "delay_ms"),
        ({"payload": [b""], "delay_ms": [DELAY_MS_MAX + 1]}, "delay_ms"),
        ({"payload": [b""], "max_retries": [1001]}, "max_retries"),
        ({"payload": [b""], "sequence": [7]}, "sequence"),
    ],
)
def test_a_field_over_its_limit_is_named(columns: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_body(ENQ.encode(1, columns), 1, CONFIG)
    assert caught.value.field == field


@pytest.mark.parametrize("count", [0, -1, BATCH_ENTRIES_MAX + 1])
def test_the_number_of_entries_is_bounded(count: int) -> None:
    with pytest.raises(InvalidArgument, match="entries"):
        check_body(body([b"x"]), count, CONFIG)


def test_runs_must_cover_the_batch() -> None:
    values = {"run_count": [1], "run_epoch": [1], "run_sequence": [1], "run_producer": [b"p"]}
    with pytest.raises(InvalidArgument) as caught:
        check_body(ENQ.encode(2, {"payload": [b"", b""], **values}, runs=1), 2, CONFIG)
    assert caught.value.field == "run_count"


entry = st.tuples(st.integers(-5, 5), st.sampled_from([b"", b"k1", b"k2"]), st.binary(max_size=9))


@given(groups=st.lists(st.lists(entry, min_size=1, max_size=5), min_size=1, max_size=5))
def test_merging_keeps_every_entry_in_order(groups: list[list[tuple[int, bytes, bytes]]]) -> None:
    bodies = []
    for group in groups:
        keys = [k for _, k, _ in group]
        values = {
            "payload": [p for _, _, p in group],
            "priority": [n for n, _, _ in group] if any(n for n, _, _ in group) else None,
            "key": keys if any(keys) else None,
        }
        bodies.append(ENQ.decode(ENQ.encode(len(group), values), len(group)))
    total = sum(map(len, groups))
    merged = ENQ.decode(merge(bodies), total)
    assert rows(merged) == [row for group in groups for row in group]


def test_merging_keeps_producers_apart() -> None:
    plain = ENQ.decode(body([b"x"]), 1)
    merged = ENQ.decode(merge([produced(2, b"a", 5), plain, produced(1, b"b", 9)]), 4)
    producers, sequences, run = producer_entries(merged)
    assert [producers[i] for i in run.tolist()] == [b"a", b"a", b"", b"b"]
    assert sequences.tolist() == [5, 6, 0, 9]


@given(chosen=st.sets(st.integers(0, 9), min_size=1))
def test_a_subset_keeps_payloads_and_producer_sequences(chosen: set[int]) -> None:
    indices = np.array(sorted(chosen))
    part = ENQ.decode(subset(produced(10, sequence=100), indices), len(indices))
    _, sequences, _ = producer_entries(part)
    assert sequences.tolist() == (indices + 100).tolist()
    assert [p for _, _, p in rows(part)] == [b"%d" % i for i in indices.tolist()]


def test_spread_goes_by_key_then_producer_then_fallback() -> None:
    keyed = ENQ.decode(body([b"x"] * 3, key=[b"a", b"", b"b"]), 3)
    where = homes_of_entries(keyed, 8, fallback=5).tolist()
    assert where == [partition_of(b"a", 8), 5, partition_of(b"b", 8)]
    again = [homes_of_entries(produced(20), 8, fallback=f).tolist() for f in (1, 2)]
    assert again[0] == again[1]
    assert len(set(again[0])) > 1
