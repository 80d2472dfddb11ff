from tests.unit.replication.parts import record

from penstock.replication.effects import Fence, Persist, TakeEpoch
from penstock.replication.facts import ReplicationOptions
from penstock.replication.takeover import Nomination, Policy, Promise, candidates


def test_a_promise_is_persisted_once() -> None:
    promise = Promise(1)
    assert promise.make(2) == [Persist(2)]
    assert promise.make(2) == []
    assert promise.make(1) == []


def test_lower_epochs_are_refused_before_the_promise_is_on_disk() -> None:
    promise = Promise(1)
    promise.make(3)
    assert not promise.accepts(2)
    assert promise.kept == 1


def test_a_fence_is_ready_when_its_promise_is_kept() -> None:
    promise = Promise(0)
    fence = Fence("a", 2)
    promise.on_fence(fence)
    assert promise.ready() == []
    promise.on_persisted(2)
    assert promise.ready() == [fence]
    assert promise.ready() == []


def test_an_older_write_that_ends_late_takes_nothing_back() -> None:
    promise = Promise(0)
    promise.on_persisted(3)
    promise.on_persisted(2)
    assert promise.kept == 3


OPTIONS = ReplicationOptions(stagger_ms=100, fence_ms=500)
AGES = {"a": 30, "b": 10, "c": 20}


def order(policy: Policy, lost: str = "") -> list[str]:
    return candidates(record(), AGES, policy=policy, lost=lost)


def test_the_record_or_the_age_gives_the_order() -> None:
    assert order(Policy.BALANCED) == ["a", "b", "c"]
    assert order(Policy.OLDEST) == ["b", "c", "a"]


def test_who_is_lost_or_not_registered_is_no_candidate() -> None:
    assert order(Policy.BALANCED, lost="a") == ["b", "c"]
    assert candidates(record(), {"c": 1}, policy=Policy.BALANCED, lost="") == ["c"]


def test_members_to_be_are_candidates_too() -> None:
    joint = record(voters="ab", joint="bc")
    assert candidates(joint, AGES, policy=Policy.BALANCED, lost="") == ["a", "b", "c"]


def test_each_waits_a_little_longer_than_the_one_before() -> None:
    nomination = Nomination("c", OPTIONS)
    assert not nomination.due(["b", "c"], 1000)
    assert not nomination.due(["b", "c"], 1099)
    assert nomination.due(["b", "c"], 1100)
    assert not nomination.due(["b"], 9999)


def test_the_others_are_asked_again_before_the_next_candidate_has_its_turn() -> None:
    """They notice a loss up to a heartbeat later. When the second question came only after
    `fence_ms`, the first candidate was refused once and the next one was taken."""
    first, second = Nomination("b", OPTIONS), Nomination("c", OPTIONS)
    assert first.due(["b", "c"], 0)
    first.ask(1, 0)
    assert not second.due(["b", "c"], 50)  # it notices now
    assert not first.due(["b", "c"], 49)
    assert first.due(["b", "c"], 50)
    assert not second.due(["b", "c"], 149)


def test_the_others_are_asked_less_often_after_a_while() -> None:
    nomination = Nomination("b", OPTIONS)
    assert nomination.due(["b"], 0)
    nomination.ask(1, 200)
    assert not nomination.due(["b"], 699)
    assert nomination.due(["b"], 700)


def test_an_epoch_that_was_asked_for_is_waited_for() -> None:
    nomination = Nomination("b", OPTIONS)
    assert nomination.due(["b"], 0)
    nomination.ask(1, 0)
    assert nomination.take(record(voters="b")) == [TakeEpoch()]
    assert not nomination.due(["b"], 499)
    assert nomination.due(["b"], 500)


def test_a_majority_has_to_miss_the_coordinator() -> None:
    nomination = Nomination("b", OPTIONS)
    nomination.ask(1, 0)
    nomination.on_probed("c", epoch=1, silent=False)
    assert nomination.take(record()) == []
    nomination.on_probed("c", epoch=0, silent=True)  # about an epoch that is over
    assert nomination.take(record()) == []
    nomination.on_probed("c", epoch=1, silent=True)
    assert nomination.take(record()) == [TakeEpoch()]


def test_one_agreement_is_good_for_one_epoch() -> None:
    nomination = Nomination("b", OPTIONS)
    nomination.ask(1, 0)
    nomination.on_probed("c", epoch=1, silent=True)
    assert nomination.take(record()) == [TakeEpoch()]
    assert nomination.take(record()) == []


def test_a_coordinator_that_is_back_ends_the_doubt() -> None:
    nomination = Nomination("b", OPTIONS)
    nomination.ask(1, 0)
    nomination.reset()
    nomination.on_probed("c", epoch=1, silent=True)
    assert nomination.take(record()) == []
