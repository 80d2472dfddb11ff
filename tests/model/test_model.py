"""Nothing that a small cluster can do breaks an invariant: every state is looked at."""

from dataclasses import replace

import pytest

from penstock.testing.model_check import CHANGES, explore, main
from penstock.testing.replication_model import Model
from penstock.testing.replication_world import VOTER, Bounds, Member, World

pytestmark = pytest.mark.timeout(900)  # a minute's work; a busy machine gets its time


@pytest.mark.parametrize(
    ("bounds", "at_least"),
    [
        pytest.param(Bounds(epochs=3, entries=3, lag=False), 150_000, id="three-epochs"),
        pytest.param(Bounds(epochs=2, entries=2), 10_000, id="late-messages"),
        pytest.param(
            replace(CHANGES["grow"], epochs=2, entries=2, lag=False), 4_000, id="reassignment"
        ),
        pytest.param(
            Bounds(epochs=2, entries=2, wipes=1, partial=False, lag=False), 20_000, id="lost-disks"
        ),
    ],
)
def test_no_state_breaks_an_invariant(bounds: Bounds, at_least: int) -> None:
    outcome = explore(Model(bounds))
    print(outcome)
    assert not outcome.broken, str(outcome)
    assert outcome.complete
    assert outcome.states > at_least  # it did look: a model that does nothing breaks nothing


def test_a_search_that_is_cut_short_says_so() -> None:
    outcome = explore(Model(Bounds()), states_max=1000)
    assert not outcome.complete
    assert "NOT complete" in str(outcome)


def test_names_do_not_tell_states_apart() -> None:
    model = Model(Bounds())
    one, other = Member(log=(1,), durable=1), Member()
    worlds = [World(1, members, (), 0) for members in ((one, other, other), (other, one, other))]
    assert model.canonical(worlds[0]) == model.canonical(worlds[1])


def test_every_kind_of_step_is_taken() -> None:
    labels: set[str] = set()

    class Watched(Model):
        def steps(self, world):  # type: ignore[no-untyped-def]
            for label, after in super().steps(world):
                labels.add(label.split()[0])
                yield label, after

    explore(Watched(Bounds(epochs=2, entries=1)))
    explore(Watched(Bounds(epochs=3, entries=2, lag=False, logs=((1,), (2,), ()))))
    explore(Watched(replace(CHANGES["grow"], epochs=2, entries=2, lag=False)))
    explore(Watched(Bounds(epochs=2, entries=2, wipes=1, seats=(VOTER, VOTER), lag=False)))
    assert labels >= {
        "take", "fence", "enter", "adopt", "begin", "write", "follow", "append", "watermark",
        "sync", "crash", "wipe", "commit", "name", "joint", "new", "learn",
    }  # fmt: skip


def test_the_command_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--epochs", "1", "--entries", "1"]) == 0
    assert "complete" in capsys.readouterr().out
