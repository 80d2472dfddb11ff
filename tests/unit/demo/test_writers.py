"""The demo's corpus in parts: any time may pass between two of them."""

import numpy as np

from penstock.demo.archive.pipeline import Scale
from penstock.demo.archive.writers import PART_ENDS, corpus_of, in_parts


def test_no_delta_arrives_in_an_earlier_part_than_its_causes() -> None:
    whole = corpus_of(Scale.of(quick=True))
    corpus, ends = in_parts(whole, PART_ENDS)
    history = corpus.history
    assert sorted(corpus.arrivals) == sorted(whole.arrivals) and ends[-1] == len(whole)
    part = np.zeros(len(history), np.int64)
    part[corpus.arrivals] = np.searchsorted(ends, np.arange(len(corpus)), side="right")
    for arrival, delta in enumerate(corpus.arrivals):  # both times that a delta may come
        assert np.searchsorted(ends, arrival, side="right") == part[delta]
    for vector in np.unique(history.vector)[:200]:
        assert (np.diff(part[history.vector == vector]) >= 0).all()


def test_the_parts_have_about_the_shares_asked_for() -> None:
    corpus, ends = in_parts(corpus_of(Scale.of(quick=True)), PART_ENDS)
    for share, end in zip(PART_ENDS, ends, strict=False):
        assert 0.8 * share < end / len(corpus) <= share


def test_within_a_part_children_still_arrive_before_their_parents() -> None:
    corpus, _ = in_parts(corpus_of(Scale.of(quick=True)), PART_ENDS)
    place = np.zeros(len(corpus.history), np.int64)
    place[corpus.arrivals[::-1]] = np.arange(len(corpus))[::-1]
    parent = corpus.history.parent
    has_one = parent >= 0
    early = (place[has_one] < place[parent[has_one]]).sum()
    assert early > 0.15 * len(corpus.history)
