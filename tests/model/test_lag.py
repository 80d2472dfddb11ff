"""Messages that are heard at once make a search some four times smaller. What does that hide?

Of the correct rules nothing: both forms go through all states and break nothing. Of the mistakes,
those about a follower whose own watermark is behind: it has none where commits are known at once.
So the larger searches run in both forms, the prompt one with every test. Mistakes that are found
from what earlier epochs have left behind need those in either form.
"""

from dataclasses import replace

import pytest
from tests.model.mistakes import LATE, MISTAKES, SMALL

from verification.model.check import explore
from verification.model.replication import Model
from verification.model.world import Bounds

pytestmark = pytest.mark.timeout(900)

LARGER = replace(LATE, entries=2, length=3)
# Found by what a follower does that has not heard of a commit.
NEED_LAG = {"a follower commits past what matched"}
NEEDS_MORE = "what is as long is taken for equal"
SMALL_ONES = [name for name, mistake in MISTAKES.items() if mistake.bounds in (SMALL, LATE)]


def found(name: str, bounds: Bounds) -> bool:
    """Whether a search finds the mistake; one that is cut short proves nothing."""
    outcome = MISTAKES[name].explored(bounds, states_max=200_000)
    assert outcome.broken or outcome.complete, str(outcome)
    return bool(outcome.broken)


def found_in_both_forms(name: str, bounds: Bounds) -> tuple[bool, bool]:
    prompt, late = (found(name, replace(bounds, lag=lag)) for lag in (False, True))
    return prompt, late


@pytest.mark.parametrize("bounds", [LATE, LARGER], ids=["2x2", "2x3"])
@pytest.mark.parametrize("lag", [False, True], ids=["prompt", "late"])
def test_correct_rules_break_nothing_in_either_form(bounds: Bounds, lag: bool) -> None:
    outcome = explore(Model(replace(bounds, lag=lag)))
    print(outcome)
    assert outcome.complete
    assert not outcome.broken, str(outcome)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_in_the_other_form_too(name: str) -> None:
    bounds = MISTAKES[name].bounds
    assert found(name, replace(bounds, lag=not bounds.lag)) == (name not in NEED_LAG)


def test_a_mistake_that_needs_lag_or_an_entry_more() -> None:
    assert found_in_both_forms(NEEDS_MORE, LATE) == (False, True)
    assert found_in_both_forms(NEEDS_MORE, LARGER) == (True, True)


@pytest.mark.parametrize("name", SMALL_ONES)
def test_both_forms_agree_on_a_mistake_with_one_entry_more(name: str) -> None:
    prompt, late = found_in_both_forms(name, LARGER)
    assert late
    assert prompt == (name not in NEED_LAG)
