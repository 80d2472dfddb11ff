import pytest

from penstock.errors import Corruption
from penstock.heap.transactions import (
    ABORTED_MS,
    DECIDED_MS,
    Doubts,
    ProducerRun,
    Share,
    SharePlace,
    Transactions,
    pack_places,
    unpack_places,
)
from penstock.model.batch import Decision

SHARE = Share(5, 2, (ProducerRun(b"p", 1, 0, 2, 0),))
PLACES = (SharePlace(1, 70), SharePlace(2, 80))


def test_a_decision_hands_out_what_was_prepared_once() -> None:
    transactions = Transactions()
    transactions.prepare(b"t", home=3, time_ms=9, share=SHARE)
    assert (transactions.prepared[b"t"].first, transactions.prepared[b"t"].count) == (5, 2)
    found = transactions.decide(b"t", Decision.COMMIT, 10)
    assert found is not None
    assert found.shares == [SHARE]
    assert transactions.decide(b"t", Decision.ABORT, 11) is None
    assert transactions.outcome(b"t") is True
    assert not transactions.prepared


def test_a_decision_may_come_without_a_share() -> None:
    transactions = Transactions()
    assert transactions.outcome(b"t") is None
    assert transactions.untouched
    assert transactions.decide(b"t", Decision.ABORT, 1) is None
    assert transactions.outcome(b"t") is False
    assert not transactions.untouched


@pytest.mark.parametrize("decision", [Decision.ABORT, Decision.COMMIT])
def test_old_outcomes_are_forgotten(decision: Decision) -> None:
    transactions = Transactions()
    transactions.decide(b"old", decision, 0)
    transactions.decide(b"new", decision, DECIDED_MS + 1)
    assert transactions.outcome(b"old") is None
    assert transactions.outcome(b"new") is bool(decision)


def test_the_oldest_of_many_outcomes_are_forgotten() -> None:
    transactions = Transactions()
    transactions.decided_max = 3
    for i in range(9):
        transactions.decide(b"%d" % i, Decision.COMMIT, 2)
    assert list(transactions.committed) == [b"6", b"7", b"8"]


def test_an_abort_outlives_its_driver_however_many_there_are() -> None:
    transactions = Transactions()
    transactions.decided_max = 3
    for i in range(9):
        transactions.decide(b"%d" % i, Decision.ABORT, i)
    assert len(transactions.aborted) == 9
    for i in range(9, 18):
        transactions.decide(b"%d" % i, Decision.COMMIT, ABORTED_MS + 9)
    assert list(transactions.aborted) == [b"6", b"7", b"8"]


def test_a_commit_is_kept_until_it_is_confirmed() -> None:
    transactions = Transactions()
    transactions.decided_max = 1
    transactions.decide(b"t", Decision.COMMIT, 0, PLACES)
    for i in range(9):
        transactions.decide(b"%d" % i, Decision.COMMIT, 2 * DECIDED_MS)
    assert transactions.outcome(b"t") is True
    transactions.decide(b"t", Decision.CONFIRMED, 2 * DECIDED_MS)
    assert transactions.outcome(b"t") is True  # for whoever repeats the decision
    transactions.decide(b"u", Decision.COMMIT, 2 * DECIDED_MS)
    assert transactions.outcome(b"t") is None


def test_what_nobody_decided_for_is_not_confirmed() -> None:
    transactions = Transactions()
    transactions.decide(b"t", Decision.ABORT, 0, PLACES)
    transactions.decide(b"t", Decision.CONFIRMED, 1)
    transactions.decide(b"u", Decision.CONFIRMED, 1)
    assert (transactions.outcome(b"t"), transactions.outcome(b"u")) == (False, None)


NONE: frozenset[bytes] = frozenset()


@pytest.mark.parametrize(
    ("answers", "confirmed"),
    [
        ({1: Doubts(70, NONE), 2: Doubts(80, NONE)}, [b"t"]),
        ({1: Doubts(70, NONE), 2: Doubts(99, frozenset([b"t"]))}, []),  # one waits for it
        ({1: Doubts(70, NONE)}, []),  # one did not answer
        ({1: Doubts(69, NONE), 2: Doubts(80, NONE)}, []),  # one has not even heard of its share
    ],
)
def test_all_participants_must_have_their_copy(
    answers: dict[int, Doubts], confirmed: list[bytes]
) -> None:
    transactions = Transactions()
    transactions.decide(b"t", Decision.COMMIT, 0, PLACES)
    assert transactions.confirmed(answers) == confirmed


def test_a_participant_tells_what_waits_for_a_home() -> None:
    transactions = Transactions()
    transactions.prepare(b"t", home=3, time_ms=9, share=SHARE)
    transactions.prepare(b"u", home=4, time_ms=9, share=SHARE)
    assert transactions.doubts(3) == {b"t"}
    transactions.decide(b"t", Decision.COMMIT, 10)
    assert transactions.doubts(3) == NONE


def test_a_home_without_its_own_share_does_not_decide_for() -> None:
    transactions = Transactions()
    assert transactions.may_commit(b"t", own=False)
    assert not transactions.may_commit(b"t", own=True)
    transactions.prepare(b"t", home=3, time_ms=9, share=SHARE)
    assert transactions.may_commit(b"t", own=True)
    transactions.decide(b"t", Decision.ABORT, 10)
    assert not transactions.may_commit(b"t", own=True)


def test_it_says_when_too_much_is_to_be_confirmed() -> None:
    transactions = Transactions()
    transactions.unconfirmed_max = 1
    assert not transactions.full
    transactions.decide(b"t", Decision.COMMIT, 0, PLACES)
    assert transactions.full


def test_they_survive_a_snapshot() -> None:
    transactions = Transactions()
    transactions.prepare(b"t", home=3, time_ms=9, share=SHARE)
    transactions.decide(b"u", Decision.ABORT, 4)
    transactions.decide(b"v", Decision.COMMIT, 5)
    transactions.decide(b"w", Decision.COMMIT, 6, PLACES)
    again = Transactions()
    again.load(transactions.dump())
    assert vars(again) == vars(transactions)


def test_a_snapshot_of_before_commits_were_confirmed_is_read() -> None:
    transactions = Transactions()
    transactions.load({"prepared": [], "decided": [[b"t", True, 1], [b"u", False, 2]]})
    assert (transactions.outcome(b"t"), transactions.outcome(b"u")) == (True, False)
    assert not transactions.unconfirmed
    assert "unconfirmed" not in transactions.dump()


def test_places_go_through_bytes() -> None:
    assert unpack_places(pack_places(PLACES)) == PLACES
    assert unpack_places(b"") == ()
    with pytest.raises(Corruption):
        unpack_places(pack_places(PLACES)[:-1])
