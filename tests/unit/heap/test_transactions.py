import pytest

from penstock.heap.transactions import DECIDED_MS, ProducerRun, Share, Transactions

SHARE = Share(5, 2, (ProducerRun(b"p", 1, 0, 2, 0),))


def test_a_decision_hands_out_what_was_prepared_once() -> None:
    transactions = Transactions()
    transactions.prepare(b"t", home=3, time_ms=9, share=SHARE)
    assert (transactions.prepared[b"t"].first, transactions.prepared[b"t"].count) == (5, 2)
    found = transactions.decide(b"t", True, 10)
    assert found is not None
    assert found.shares == [SHARE]
    assert transactions.decide(b"t", False, 11) is None
    assert transactions.outcome(b"t") is True
    assert not transactions.prepared


def test_a_decision_may_come_without_a_share() -> None:
    transactions = Transactions()
    assert transactions.outcome(b"t") is None
    assert transactions.decide(b"t", False, 1) is None
    assert transactions.outcome(b"t") is False


def test_old_outcomes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    transactions = Transactions()
    transactions.decide(b"old", True, 0)
    transactions.decide(b"new", True, DECIDED_MS + 1)
    assert list(transactions.decided) == [b"new"]
    monkeypatch.setattr("penstock.heap.transactions.DECIDED_MAX", 3)
    for i in range(9):
        transactions.decide(b"%d" % i, True, DECIDED_MS + 2)
    assert list(transactions.decided) == [b"6", b"7", b"8"]


def test_they_survive_a_snapshot() -> None:
    transactions = Transactions()
    transactions.prepare(b"t", home=3, time_ms=9, share=SHARE)
    transactions.decide(b"u", False, 4)
    again = Transactions.load(transactions.dump())
    assert again.prepared == transactions.prepared
    assert again.decided == transactions.decided
