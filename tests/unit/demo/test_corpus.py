"""The corpus: the shares that were asked for, causes that hold, the same bytes for one seed."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from penstock.demo.corpus import ALL_OPS, Corpus, CorpusOptions, generate
from penstock.errors import InvalidArgument
from penstock.model.delta import Delta, Op, decode
from penstock.model.delta_batch import DeltaBatch
from penstock.model.delta_checks import validate

MIXED = CorpusOptions(
    deltas=8_000,
    vectors=300,
    dimensions=24,
    components=5,
    duplicates=0.05,
    disorder=0.2,
    concurrent=0.1,
    window=200,
    ops=ALL_OPS,
    namespaces=("docs", "images-2"),
)


@pytest.fixture(scope="module")
def mixed() -> Corpus:
    return generate(MIXED)


def arrived(corpus: Corpus) -> list[Delta]:
    return [decode(payload) for chunk in corpus.chunks(999) for payload in chunk.payloads]


def test_the_shares_are_those_asked_for(mixed: Corpus) -> None:
    facts = mixed.facts
    assert (facts["rows"], facts["duplicates"], facts["vectors"]) == (8000, 400, 300)
    assert 0.19 <= facts["early"] / facts["deltas"] <= 0.2
    assert 0.08 <= facts["concurrent"] / facts["deltas"] <= 0.12
    assert len({delta.delta_id for delta in arrived(mixed)}) == 7600


def test_the_same_seed_gives_the_same_bytes_however_it_is_cut(mixed: Corpus) -> None:
    again, other = generate(MIXED), generate(CorpusOptions(deltas=8_000, vectors=300, seed=1))
    whole = b"".join(bytes(chunk.payloads.blob) for chunk in mixed.chunks(8_000))
    assert whole == b"".join(bytes(chunk.payloads.blob) for chunk in again.chunks(77))
    assert not set(arrived_ids(mixed)) & set(arrived_ids(other))


def arrived_ids(corpus: Corpus) -> list[bytes]:
    return [row.tobytes() for row in corpus.history.delta_id]


def test_a_clock_counts_what_its_writer_had_seen(mixed: Corpus) -> None:
    """Ancestors by `parent` are seen; own counters have no gap; no cause lies in the future."""
    distinct = {delta.delta_id: delta for delta in arrived(mixed)}
    counters: dict[tuple[str, str], set[int]] = {}
    for delta in distinct.values():
        own = delta.clock[delta.origin]
        counters.setdefault((delta.vector_id, delta.origin), set()).add(own)
        if delta.parent is not None:
            parent = distinct[delta.parent]
            assert (parent.namespace, parent.vector_id) == (delta.namespace, delta.vector_id)
            assert parent.time < delta.time
            assert all(delta.clock[name] >= seen for name, seen in parent.clock.items())
    assert all(found == set(range(1, len(found) + 1)) for found in counters.values())


def test_children_arrive_before_their_parent_within_the_window(mixed: Corpus) -> None:
    first: dict[bytes, int] = {}
    deltas = arrived(mixed)
    for at, delta in enumerate(deltas):
        first.setdefault(delta.delta_id, at)
    gaps = [first[d.parent] - first[d.delta_id] for d in deltas if d.parent is not None]
    waits = [gap for gap in gaps if gap > 0]
    assert len(waits) >= mixed.early
    # Places are of distinct deltas in order: early ones and duplicates stretch the window.
    assert max(waits) <= MIXED.window * 1.5


def test_writers_of_one_round_do_not_know_each_other(mixed: Corpus) -> None:
    distinct = {delta.delta_id: delta for delta in arrived(mixed)}
    rounds = Counter((d.vector_id, d.parent) for d in distinct.values())
    siblings = [key for key, count in rounds.items() if count > 1]
    assert sum(rounds[key] - 1 for key in siblings) == mixed.facts["concurrent"]
    family = [d for d in distinct.values() if (d.vector_id, d.parent) == siblings[0]]
    seen = [{k: v - (k == d.origin) for k, v in d.clock.items()} for d in family]
    assert len({d.origin for d in family}) == len(family)
    assert all({k: v for k, v in s.items() if v} == {k: v for k, v in seen[0].items() if v}
               for s in seen)  # fmt: skip


def test_every_payload_is_one_the_node_accepts(mixed: Corpus) -> None:
    for chunk in mixed.chunks(1_000):
        sequences = np.arange(1, len(chunk) + 1, dtype=np.uint64)
        times = np.zeros(len(chunk), np.int64)
        batch = DeltaBatch.of(chunk.payloads, sequences=sequences, log_times_ms=times)
        validate(batch, dimensions=MIXED.dimensions, now_ms=MIXED.start_ms + 10_000)
    ops = Counter(delta.op for delta in arrived(mixed))
    assert set(ops) == set(Op)
    names = {(delta.namespace, delta.vector_id) for delta in arrived(mixed)}
    assert names == {mixed.name_of(vector) for vector in range(300)}


@pytest.mark.parametrize(
    ("field", "value"),
    [("deltas", 0), ("dimensions", 4097), ("disorder", 0.5), ("components", 129)],
)
def test_an_impossible_option_is_named(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as refused:
        generate(CorpusOptions(**{field: value}))  # type: ignore[arg-type]
    assert refused.value.field == field


def test_it_needs_no_pytest() -> None:
    code = "import penstock.demo.corpus, sys; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
