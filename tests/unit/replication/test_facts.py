import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.replication.parts import facts

from penstock.replication.facts import LogFacts
from penstock.replication.rules import End

logs = st.lists(st.integers(1, 5), max_size=8).map(sorted)


@given(logs)
def test_epochs_are_those_of_the_entries(epochs: list[int]) -> None:
    log = facts(*epochs)
    log.validate()
    assert [log.epoch_at(n) for n in range(len(epochs) + 2)] == [None, *epochs, None]
    assert log.end == End(epochs[-1] if epochs else 0, len(epochs))
    for epoch in range(7):
        places = [n for n, e in enumerate(epochs, 1) if e == epoch]
        assert log.last_of(epoch) == (places[-1] if places else None)


@given(logs, st.integers(0, 8))
def test_the_tail_reaches_past_the_commit(epochs: list[int], committed: int) -> None:
    committed = min(committed, len(epochs))
    last = {epoch: n for n, epoch in enumerate(epochs, 1)}
    expected = [(epoch, n) for epoch, n in last.items() if n >= committed]
    assert facts(*epochs).tail(committed) == expected


@given(logs, st.integers(0, 8))
def test_a_truncated_log_is_the_log_of_what_is_left(epochs: list[int], sequence: int) -> None:
    log = facts(*epochs)
    log.truncate(sequence)
    log.validate()
    left = facts(*epochs[:sequence])
    assert (log.end, log.durable, log.tail(0)) == (left.end, left.durable, left.tail(0))


@given(logs)
def test_a_log_that_is_extended_entry_by_entry_is_the_same(epochs: list[int]) -> None:
    log = LogFacts()
    for sequence, epoch in enumerate(epochs, 1):
        log.extend(epoch=epoch, last=sequence)
    assert log.tail(0) == facts(*epochs).tail(0)
    assert log.durable == 0


def test_epochs_do_not_go_back() -> None:
    with pytest.raises(ValueError, match="epoch 1 after 2"):
        facts(2).extend(epoch=1, last=2)


def test_only_what_is_synced_is_the_durable_end() -> None:
    assert facts(1, 1, 2, durable=2).end_durable == End(1, 2)
    assert facts(1, durable=0).end_durable == End(0, 0)


def test_a_seeded_log_knows_where_it_was_seeded() -> None:
    log = LogFacts(first=10, last=9, durable=9, runs=[(4, 9)])
    log.validate()
    assert log.end_durable == End(4, 9)
    assert log.tail(9) == [(4, 9)]
    assert log.epoch_at(8) is None
