"""Sinks that fail, refuse or lie: retries, the breaker, dead letters, quarantine, halting."""

from pathlib import Path

import pytest
from tests.unit.spark.delivery.delivering import (
    FileSink,
    FileTopics,
    Triggers,
    delivery_of,
    eventually,
)

from penstock.model.delta import decode
from penstock.sinks.protocol import Feed
from penstock.spark.delivery.backlog import CursorFile, SinkCursor
from penstock.spark.delivery.delivery import PipelineDelivery
from penstock.spark.store import FolderStore


@pytest.fixture
def triggers(tmp_path: Path) -> Triggers:
    return Triggers(tmp_path)


@pytest.fixture
def topics(tmp_path: Path) -> FileTopics:
    return FileTopics(tmp_path / "topics.lines")


def delivered(delivery: PipelineDelivery) -> None:
    delivery.start()
    assert delivery.drain(20)
    assert delivery.stop() == []


def test_a_failing_sink_is_tried_again_until_it_takes_it(
    triggers: Triggers, tmp_path: Path
) -> None:
    triggers.commit(("a", 1))
    sink = FileSink(tmp_path)
    sink.failures = 4
    delivery = delivery_of(triggers, sink, folder=tmp_path)
    delivered(delivery)
    assert sink.states() == {"a": 1}
    meter = delivery.workers[0].runner.meter
    assert (meter.failures, meter.writes, meter.opens) == (4, 1, 0)
    assert meter.last_error is not None and "switched off" in meter.last_error["message"]


def test_the_tenth_failure_opens_the_breaker_and_a_success_closes_it(
    triggers: Triggers, tmp_path: Path
) -> None:
    triggers.commit(("a", 1))
    sink, other = FileSink(tmp_path), FileSink(tmp_path, name="other")
    sink.failures = 10
    delivery = delivery_of(triggers, sink, other, folder=tmp_path)
    delivery.start()
    eventually(lambda: delivery.status()["sinks"][0]["breaker"]["state"] == "open")
    shown = delivery.status()["sinks"][0]
    assert (shown["state"], shown["breaker"]["opened"]) == ("waiting", 1)
    assert 20 < shown["breaker"]["retry_in_s"] <= 30
    assert shown["lag"]["rows"] == 1
    eventually(lambda: delivery.workers[1].caught_up(0))
    delivery.workers[0].runner.retry._open_until -= 30  # half a minute later
    assert delivery.drain(20)
    delivery.stop()
    assert sink.states() == {"a": 1}
    assert sink.opened == 2  # the probe began with a new connection
    assert delivery.status()["sinks"][0]["breaker"]["state"] == "closed"


def test_a_stop_does_not_wait_for_a_pause_to_end(triggers: Triggers, tmp_path: Path) -> None:
    triggers.commit(("a", 1))
    sink = FileSink(tmp_path)
    sink.failures = 1000
    delivery = delivery_of(triggers, sink, folder=tmp_path)
    delivery.start()
    eventually(lambda: delivery.workers[0].runner.meter.opens == 1)
    assert not delivery.drain(0.01)
    assert delivery.stop(timeout_s=5) == []
    assert delivery.workers[0].durable_through == -1


@pytest.mark.parametrize("feed", [Feed.STATES, Feed.DELTAS])
def test_rejected_rows_become_dead_letters_and_the_rest_goes_on(
    triggers: Triggers, topics: FileTopics, tmp_path: Path, feed: Feed
) -> None:
    triggers.commit(("a", 1), ("bad", 1, 0), headers={"team": "search"})
    triggers.commit(("b", 1), ("bad", 2, 1), payloads=True)
    sink = FileSink(tmp_path, feed=feed, ordered=True, rejects=["bad"])
    delivery = delivery_of(triggers, sink, folder=tmp_path, topics=topics)
    delivered(delivery)
    assert set(sink.states()) | {"a", "b"} == {"a", "b"}
    first, second = topics.messages("vectors-dlq-file")
    found = [decode(bytes.fromhex(letter["payload"])) for letter in (first, second)]
    assert [(d.vector_id, d.clock) for d in found] == [("bad", {"tests": 1}), ("bad", {"tests": 2})]
    assert (first["n"], second["n"]) == (2, 4)
    assert (first["priority"], second["priority"]) == (0, 1)
    assert first["headers"] == {
        "team": "search", "penstock-reason": "not to my taste", "penstock-sink": "file",
        "penstock-error": "sink_rejected", "penstock-pipeline": "p-0123456789ab",
        "penstock-topic": "vectors", "penstock-partition": "0", "penstock-sequence": "2",
    }  # fmt: skip
    assert delivery.workers[0].runner.meter.dead_letters == 2


def test_dead_letters_wait_for_the_node_without_a_second_write(
    triggers: Triggers, topics: FileTopics, tmp_path: Path
) -> None:
    triggers.commit(("bad", 1), ("a", 1))
    topics.failures = 3
    sink = FileSink(tmp_path, rejects=["bad"])
    delivery = delivery_of(triggers, sink, folder=tmp_path, topics=topics)
    delivered(delivery)
    assert len(sink.lines()) == 1
    assert len(topics.messages("vectors-dlq-file")) == 1
    assert delivery.workers[0].runner.meter.failures == 3


def test_quarantined_deltas_become_messages_with_reason_and_parent(
    triggers: Triggers, topics: FileTopics, tmp_path: Path
) -> None:
    triggers.commit(("a", 1), quarantine=["orphan"])
    triggers.commit(quarantine=["orphan", "stray"])
    delivered(delivery_of(triggers, folder=tmp_path, topics=topics))
    letters = topics.messages("vectors-quarantine")
    assert [letter["n"] for letter in letters] == [1, 2, 3]
    assert decode(bytes.fromhex(letters[2]["payload"])).vector_id == "stray"
    headers = letters[0]["headers"]
    assert headers["penstock-reason"] == "its parent never came"
    assert headers["penstock-missing"] == "07" * 16
    assert triggers.log.first == 1


def test_a_sink_that_lost_rows_gets_them_again(triggers: Triggers, tmp_path: Path) -> None:
    for vector in "abc":
        triggers.commit((vector, 1))
    sink = FileSink(tmp_path, feed=Feed.DELTAS, ordered=True, own_cursor=True)
    broken = FileSink(tmp_path, name="broken")  # keeps the triggers from being deleted
    broken.failures = 1 << 30
    for expected in ([1, 2, 3], [1, 2, 3]):
        delivery = delivery_of(triggers, sink, broken, folder=tmp_path)
        delivery.start()
        eventually(lambda: delivery.workers[0].caught_up(2))  # noqa: B023
        delivery.stop()
        assert sink.ordinals() == expected
        sink.reset()


def test_a_sink_that_lost_what_is_deleted_halts_and_says_so(
    triggers: Triggers, tmp_path: Path
) -> None:
    for vector in "abc":
        triggers.commit((vector, 1))
    sink = FileSink(tmp_path, feed=Feed.DELTAS, ordered=True, own_cursor=True)
    delivered(delivery_of(triggers, sink, folder=tmp_path))
    assert triggers.log.first == 2
    sink.reset()
    delivery = delivery_of(triggers, sink, folder=tmp_path)
    delivery.start()
    eventually(lambda: delivery.workers[0].state == "halted")
    assert "no longer in the change log" in (delivery.workers[0].halted or "")
    assert delivery.drain(1)
    delivery.stop()
    assert delivery.halted == ["file"]
    assert sink.lines() == []


def test_a_cursor_ahead_of_the_change_log_halts(triggers: Triggers, tmp_path: Path) -> None:
    triggers.commit(("a", 1))
    CursorFile(FolderStore(tmp_path), "file").save(SinkCursor(position=(7,)))
    delivery = delivery_of(triggers, FileSink(tmp_path), folder=tmp_path)
    delivery.start()
    eventually(lambda: delivery.workers[0].state == "halted")
    delivery.stop()
    assert "a sink of another state" in delivery.status()["sinks"][0]["last_error"]["message"]


def test_a_new_sink_begins_with_the_oldest_trigger_and_tells(
    triggers: Triggers, tmp_path: Path
) -> None:
    for vector in "abc":
        triggers.commit((vector, 1))
    delivered(delivery_of(triggers, FileSink(tmp_path), folder=tmp_path))
    late = FileSink(tmp_path, name="late")
    delivery = delivery_of(triggers, FileSink(tmp_path), late, folder=tmp_path)
    delivered(delivery)
    assert late.states() == {"c": 1}
    assert delivery.status()["sinks"][1]["started"] == 2


def test_the_attempt_on_file_is_written_again_as_it_was(triggers: Triggers, tmp_path: Path) -> None:
    for vector in "abcd":
        triggers.commit((vector, 1))
    file = CursorFile(FolderStore(tmp_path), "file")
    file.save(SinkCursor(position=(0,), attempt=(1, 2)))
    sink = FileSink(tmp_path, feed=Feed.DELTAS, ordered=True)
    delivered(delivery_of(triggers, sink, folder=tmp_path))
    assert [(line["first"], line["last"]) for line in sink.lines()] == [(1, 2), (3, 3)]
    found = file.load()
    assert found is not None and found.attempt is None


def test_a_sink_that_needs_what_was_not_written_halts_instead_of_skipping_it(
    triggers: Triggers, tmp_path: Path
) -> None:
    """It came later, over triggers that were written when nobody took states, or payloads."""
    triggers.feed = ("deltas",)
    triggers.commit(("a", 1))
    triggers.feed = ("states", "deltas")
    triggers.commit(("b", 1))
    deltas = FileSink(tmp_path, name="deltas", feed=Feed.DELTAS)
    states, remote = (
        FileSink(tmp_path, name="states"),
        FileSink(tmp_path, name="remote", feed=Feed.DELTAS | Feed.PAYLOADS, ordered=True),
    )
    delivery = delivery_of(triggers, deltas, states, remote, folder=tmp_path)
    delivered(delivery)
    assert delivery.halted == ["states", "remote"]
    told = [sink["last_error"] for sink in delivery.status()["sinks"][1:3]]
    assert "trigger 0 was written while no sink took states" in told[0]["message"]
    assert "trigger 0 was written while no sink took payloads" in told[1]["message"]
    assert deltas.ordinals() == [1, 2] and states.states() == {}
