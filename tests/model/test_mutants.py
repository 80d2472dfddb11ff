"""Plausible mistakes, one at a time: each is found, and not by luck.

The explorer has to come upon a state that breaks an invariant; what no state of a small cluster can
show is shown on the machines themselves. That the correct rules break nothing within the very same
bounds is in `test_model.py`.
"""

import pytest
from tests.model.mistakes import MISTAKES, REASSIGNED, SMALL, TruncatesLater
from tests.unit.replication.parts import facts as log_of
from tests.unit.replication.parts import followed, following

from penstock.replication import rules
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import Halt, Truncate
from verification.model.check import explore
from verification.model.replication import Model

pytestmark = pytest.mark.timeout(900)


def joint_by_one(self: PartitionRecord) -> tuple[tuple[str, ...], ...]:
    return (self.joint,) if self.joint else (self.voters,)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_explorer_finds(name: str) -> None:
    mistake = MISTAKES[name]
    outcome = mistake.explored(mistake.bounds)
    print(f"{name}: {outcome.broken} after {len(outcome.trace)} steps, {outcome.states} states")
    assert outcome.broken, f"not found in {outcome}"


def test_what_a_mistake_is_built_upon_is_none_itself() -> None:
    outcome = explore(TruncatesLater(SMALL))
    assert outcome.complete
    assert not outcome.broken, str(outcome)


def test_the_explorer_finds_that_a_joint_quorum_is_of_one_set_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PartitionRecord, "quorums", property(joint_by_one))
    outcome = explore(Model(REASSIGNED))
    print(f"{outcome.broken} after {len(outcome.trace)} steps, {outcome.states} states")
    assert outcome.broken


def test_a_replica_that_truncates_below_its_commit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No correct coordinator asks for it, so no state of the model shows it."""

    def asked() -> list[object]:
        machine, follow = following(log=log_of(1, 1), committed=2)
        return list(machine.on_followed(followed(follow, 1), 0))

    assert [type(effect) for effect in asked()] == [Halt]
    monkeypatch.setattr(rules, "may_truncate", lambda sequence, *, committed: True)
    assert Truncate(1) in asked()  # so the test above would fail
