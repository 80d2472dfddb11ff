from tests.unit.replication.parts import record

from penstock.replication.nomination import Nomination, Policy, candidates
from penstock.replication.options import ReplicationOptions

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


def test_the_others_are_asked_again_after_a_while() -> None:
    nomination = Nomination("b", OPTIONS)
    assert nomination.due(["b"], 0)
    nomination.ask(1, 0)
    assert not nomination.due(["b"], 499)
    assert nomination.due(["b"], 500)


def test_a_majority_has_to_miss_the_coordinator() -> None:
    nomination = Nomination("b", OPTIONS)
    nomination.ask(1, 0)
    nomination.on_probed("c", epoch=1, silent=False)
    assert not nomination.agreed(record())
    nomination.on_probed("c", epoch=0, silent=True)  # about an epoch that is over
    assert not nomination.agreed(record())
    nomination.on_probed("c", epoch=1, silent=True)
    assert nomination.agreed(record())


def test_one_agreement_is_good_for_one_epoch() -> None:
    nomination = Nomination("b", OPTIONS)
    nomination.ask(1, 0)
    nomination.on_probed("c", epoch=1, silent=True)
    nomination.taken()
    assert not nomination.agreed(record())


def test_a_coordinator_that_is_back_ends_the_doubt() -> None:
    nomination = Nomination("b", OPTIONS)
    nomination.ask(1, 0)
    nomination.reset()
    nomination.on_probed("c", epoch=1, silent=True)
    assert not nomination.agreed(record())
