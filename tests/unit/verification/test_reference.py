"""The kernels' fold of a corpus, held against the slow one."""

import msgspec
import numpy as np
import pytest

from penstock.demo.corpus import ALL_OPS, SPARSE_ONLY, CorpusOptions, generate
from penstock.model.delta import decode
from penstock.model.delta_batch import DeltaBatch
from penstock.propagation.fold.propagator import Propagator
from verification.reference import fold


@pytest.mark.parametrize("ops", [SPARSE_ONLY, ALL_OPS], ids=["sparse", "all"])
def test_the_kernels_agree_with_the_slow_fold(ops) -> None:  # type: ignore[no-untyped-def]
    corpus = generate(
        CorpusOptions(deltas=6_000, vectors=200, dimensions=16, components=4, duplicates=0.05,
                      disorder=0.2, concurrent=0.1, window=300, ops=ops, seed=3)
    )  # fmt: skip
    propagator, released, first = Propagator(16), 0, 1
    for chunk in corpus.chunks(777):
        sequences = np.arange(first, first + len(chunk), dtype=np.uint64)
        times = np.full(len(chunk), 1_000 + first, np.int64)
        deltas = DeltaBatch.of(chunk.payloads, sequences=sequences, log_times_ms=times)
        first += len(chunk)
        released += len(propagator.feed(deltas, through=first - 1).released)
    payloads = [p for chunk in corpus.chunks() for p in chunk.payloads]
    expected = fold(map(decode, payloads), dimensions=16)
    assert released == corpus.facts["deltas"]
    states = propagator.states()
    names = zip(states.namespace, states.vector_id, strict=True)
    rows = {(n.decode(), v.decode()): row for row, (n, v) in enumerate(names)}
    assert rows.keys() == expected.keys()
    for key, one in expected.items():
        row = rows[key]
        assert (int(states.revision[row]), bool(states.deleted[row])) == (one.revision, one.deleted)
        if not one.deleted:
            assert states.values[row].tobytes() == one.values.tobytes(), key
            packed = states.metadata[row]
            assert (msgspec.msgpack.decode(packed) if packed else None) == one.metadata
