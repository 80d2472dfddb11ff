"""`kill -9` in every window of a delivery: nothing is lost, and nothing takes effect twice."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.spark.delivery.delivering import FileTopics, Triggers
from tests.unit.spark.delivery.delivery_child import sinks_in

ROOT = Path(__file__).parents[4]
Deliver = Callable[[Path, str], int]
DELIVERY_POINTS = (  # in the order of a write's life
    "delivery.attempt.saved",  # the range of a coalesced write is on file, nothing is written
    "delivery.write.before",
    "delivery.write.after",  # the sink holds it, the cursor does not say so
    "delivery.rejected.before",  # the rest is written, the rejected rows are nowhere
    "delivery.rejected.after",  # they are dead letters, the cursor does not say so
    "delivery.cursor.before",
    "delivery.cursor.after",
    "delivery.prune.after",
)


@pytest.fixture(scope="module")
def deliver() -> Iterator[Deliver]:
    """Runs a delivery in a process of its own and returns its exit code."""
    command = [sys.executable, "-m", "tests.unit.spark.delivery.delivery_child"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as forks:
        assert forks.stdin is not None and forks.stdout is not None

        def run(folder: Path, crash: str = "none") -> int:
            forks.stdin.write(f"{crash} {folder}\n")
            forks.stdin.flush()
            return int(forks.stdout.readline())

        yield run
        forks.stdin.close()


def commit(triggers: Triggers) -> None:
    """Some more triggers: urgent and late, empty, rejected and quarantined."""
    n = triggers.log.last or 0
    triggers.commit(("a", n + 2, 3), (f"b{n}", 1, 0), quarantine=[f"lost{n}"])
    triggers.commit()
    triggers.commit(("a", n + 3, 0), ("bad", n + 1))


@pytest.mark.parametrize("point", DELIVERY_POINTS)
def test_a_crash_neither_loses_nor_doubles(deliver: Deliver, tmp_path: Path, point: str) -> None:
    triggers = Triggers(tmp_path)
    for nth in (1, 2, 3):
        commit(triggers)
        deliver(tmp_path, f"{point}:{nth}")
    commit(triggers)
    assert deliver(tmp_path) == 0
    check(tmp_path, triggers)


def test_a_crash_happens_where_it_is_asked_for(deliver: Deliver, tmp_path: Path) -> None:
    commit(Triggers(tmp_path))
    for point in DELIVERY_POINTS[:-1]:
        assert deliver(tmp_path, f"{point}:1") == -signal.SIGKILL, point


def check(folder: Path, triggers: Triggers) -> None:
    """Four rounds of `commit`, of which each has one delta that the sinks reject, the fourth."""
    unordered, ordered, own = sinks_in(folder)
    topics = FileTopics(folder / "topics.lines")
    assert unordered.states() == ordered.states() == {"a": 11, "b0": 1, "b2": 1, "b5": 1, "b8": 1}
    rejected = {4, 8, 12, 16}
    taken = set(range(1, triggers.ordinal + 1)) - rejected
    for sink in (ordered, own):
        assert Counter(sink.ordinals()) == Counter(taken), sink.name
    for sink in (unordered, ordered, own):
        letters = topics.messages(f"vectors-dlq-{sink.name}")
        assert Counter(m["n"] for m in letters) == Counter(rejected), sink.name
    lost = topics.messages("vectors-quarantine")
    assert Counter(m["n"] for m in lost) == Counter(range(1, triggers.quarantined + 1))
