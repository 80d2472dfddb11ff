"""Nothing that a small cluster can do breaks an invariant: every state is looked at."""

from dataclasses import replace

import pytest
from tests.model.mistakes import MISTAKES, REASSIGNED

from verification.model.check import CHANGES, explore, main
from verification.model.replication import Model
from verification.model.world import VOTER, Bounds, Member, World, written

pytestmark = pytest.mark.timeout(900)  # a minute's work; a busy machine gets its time

WHERE_FOUND = {mistake.bounds: name for name, mistake in MISTAKES.items()}


def nothing_breaks(bounds: Bounds) -> int:
    """How many states there were to look at."""
    outcome = explore(Model(bounds))
    print(outcome)
    assert not outcome.broken, str(outcome)
    assert outcome.complete
    return outcome.states


@pytest.mark.parametrize(
    ("bounds", "at_least"),
    [
        pytest.param(
            Bounds(epochs=3, entries=3, length=3, lag=False), 150_000, id="three-epochs-three-long"
        ),
        pytest.param(Bounds(epochs=3, entries=1, lag=False), 100_000, id="three-epochs-whole-logs"),
        pytest.param(Bounds(epochs=2, entries=1), 30_000, id="late-messages"),
        pytest.param(replace(CHANGES["grow"], epochs=2, entries=1, lag=False), 4_000, id="grow"),
        pytest.param(replace(CHANGES["swap"], epochs=2, entries=0, lag=False), 50_000, id="swap"),
    ],
)
def test_no_state_breaks_an_invariant(bounds: Bounds, at_least: int) -> None:
    assert nothing_breaks(bounds) > at_least  # a model that does nothing breaks nothing


@pytest.mark.parametrize("bounds", WHERE_FOUND, ids=WHERE_FOUND.values())
def test_without_a_mistake_nothing_breaks_where_it_was_found(bounds: Bounds) -> None:
    """The control of `test_mutants.py`: it is the mistake that breaks something there, not the
    bounds, nor the logs that they begin with."""
    assert nothing_breaks(bounds) > 4_000


def test_three_epochs_leave_room_for_what_clients_write() -> None:
    logs: set[tuple[int, ...]] = set()

    class Watched(Model):
        def canonical(self, world: World) -> World:
            logs.update(member.log for member in world.members)
            return super().canonical(world)

    explore(Watched(Bounds(epochs=3, entries=1, lag=False, logs=((1, 2), (1, 2), (1, 2)))))
    assert max(written(log) for log in logs) == 1
    assert {(1, 2, 3), (1, 2, 3, 3)} <= logs


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

    explore(Watched(Bounds(epochs=2, length=1)))
    explore(Watched(Bounds(epochs=3, length=2, lag=False, logs=((1,), (2,), ()))))
    explore(Watched(REASSIGNED))
    explore(Watched(Bounds(epochs=2, length=2, wipes=1, seats=(VOTER, VOTER), lag=False)))
    assert labels >= {
        "take", "fence", "enter", "adopt", "begin", "write", "follow", "append", "watermark",
        "sync", "crash", "wipe", "commit", "name", "joint", "new", "learn",
    }  # fmt: skip


def test_the_command_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--epochs", "1", "--entries", "1"]) == 0
    assert "complete" in capsys.readouterr().out
