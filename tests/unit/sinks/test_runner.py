"""The thread of a sink: it tries again, opens anew, and buries what is refused."""

import threading
from pathlib import Path

from tests.conformance.sinks.changes import delta, deltas
from tests.unit.spark.delivery.delivering import FileTopics, eventually

from penstock.errors import SinkRejected, Unavailable
from penstock.node.observe.logs import get_logger
from penstock.sinks.health import Patience
from penstock.sinks.protocol import Feed, Work
from penstock.sinks.runner import Handover, SinkRunner
from penstock.sinks.topics import LetterBox

PATIENCE = Patience(backoff_s_base=0.001, backoff_s_cap=0.001, breaker_failures=3)


class Recording:
    """A sink that notes its calls; `failing` writes fail before one is taken."""

    name, feed, ordered = "sink", Feed.DELTAS, True

    def __init__(self, *, failing: int = 0, refuses: tuple[int, ...] = ()) -> None:
        self.calls: list[str] = []
        self.failing, self.refuses = failing, refuses
        self.held = threading.Event()
        self.held.set()

    def open(self) -> None:
        self.calls.append("open")

    def cursor(self) -> int | None:
        return 7

    def write(self, work: Work) -> None:
        self.calls.append("write")
        self.held.wait()
        if self.failing:
            self.failing -= 1
            raise Unavailable("away")
        if self.refuses:
            raise SinkRejected("no", rows=list(self.refuses), table="deltas")

    def close(self) -> None:
        self.calls.append("close")


class Owner:
    """Hands one work to the sink, and rests when it is in."""

    def __init__(
        self, sink: Recording, folder: Path, patience: Patience = PATIENCE, *, away: int = 0
    ) -> None:
        self.topics = FileTopics(folder / "topics.lines")
        self.topics.failures = away
        box = LetterBox(writer=self.topics, create=self.topics.create)
        table = deltas(1, delta(1), delta(2))
        self.handover = Handover(work=Work(pipeline="p", first=1, last=1, deltas=table))
        self.told: list[int | None] = []
        self.done = threading.Event()
        self.woken = threading.Event()
        self.runner = SinkRunner(
            sink,  # type: ignore[arg-type]
            thread="test",
            letters=box,
            patience=patience,
            log=get_logger(__name__),
            advance=self.advance,
            rest=self.woken.wait,  # type: ignore[arg-type]
            end=lambda: None,
            hang_s=0.01,
        )
        self.runner.start()

    def advance(self) -> bool:
        if not self.runner.opened:
            self.runner.open(lambda: self.told.append(self.runner.sink.cursor()))
            return True
        if self.done.is_set():
            return False
        self.runner.write(self.handover)
        self.runner.bury(self.handover, list)
        self.runner.succeeded()
        self.done.set()
        return True

    def end(self) -> bool:
        self.runner.stop()
        self.woken.set()
        return self.runner.join(5.0)


def test_what_fails_is_tried_again(tmp_path: Path) -> None:
    sink = Recording(failing=2)
    owner = Owner(sink, tmp_path)
    assert owner.done.wait(5.0)
    eventually(lambda: owner.runner.state == "idle")
    assert owner.end()
    assert sink.calls == ["open", "write", "write", "write", "close"]
    assert (owner.told, owner.runner.meter.failures, owner.runner.retry.failures) == ([7], 2, 0)
    assert owner.runner.state == "stopped"


def test_an_open_breaker_closes_the_sink_and_its_probe_opens_it_anew(tmp_path: Path) -> None:
    sink = Recording(failing=3)
    quick = Patience(backoff_s_cap=0.001, breaker_failures=3, breaker_open_s=0.05)
    owner = Owner(sink, tmp_path, quick)
    eventually(lambda: owner.runner.state == "waiting")
    assert owner.done.wait(5.0)
    assert owner.end()
    assert sink.calls == [
        *("open", "write", "write", "write", "close"),
        *("open", "write", "close"),
    ]
    assert owner.runner.meter.opens == 1


def test_refused_rows_become_letters_once(tmp_path: Path) -> None:
    sink = Recording(refuses=(1,))
    owner = Owner(sink, tmp_path, away=1)
    assert owner.done.wait(5.0)
    assert owner.end()
    assert sink.calls.count("write") == 1  # what is in the sink is not written for a letter's sake
    assert (owner.runner.meter.rejected, owner.runner.meter.dead_letters) == (1, 1)
    (letter,) = owner.topics.messages("vectors-dlq-sink")
    assert letter["headers"]["penstock-reason"] == "no"
    assert owner.handover.refused is None


def test_a_call_that_hangs_is_let_go_of(tmp_path: Path) -> None:
    sink = Recording()
    sink.held.clear()
    owner = Owner(sink, tmp_path)
    eventually(lambda: owner.runner.state == "hanging")
    owner.runner.stop()
    owner.woken.set()
    assert not owner.runner.join(0.01)
    sink.held.set()
    assert owner.runner.join(5.0)
