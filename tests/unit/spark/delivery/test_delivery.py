"""Delivery to sinks that are well: order, lanes, coalescing, pruning, status, the end."""

import json
import threading
from pathlib import Path

import pytest
from tests.unit.spark.delivery.delivering import FileSink, Triggers, delivery_of, eventually

from penstock.sinks.protocol import Feed
from penstock.spark.delivery.backlog import CursorFile
from penstock.spark.delivery.delivery import read_status
from penstock.spark.settings import DeliveryOptions


@pytest.fixture
def triggers(tmp_path: Path) -> Triggers:
    return Triggers(tmp_path)


def test_every_sink_gets_what_was_committed(triggers: Triggers, tmp_path: Path) -> None:
    triggers.commit(("a", 1), ("b", 1))
    triggers.commit(("a", 2))
    states = FileSink(tmp_path, name="states")
    deltas = FileSink(tmp_path, name="deltas", feed=Feed.DELTAS, ordered=True)
    delivery = delivery_of(triggers, states, deltas, folder=tmp_path)
    delivery.start()
    assert delivery.drain(10)
    triggers.commit(("c", 1))
    assert delivery.drain(10)
    assert delivery.stop() == []
    assert states.states() == {"a": 2, "b": 1, "c": 1}
    assert deltas.ordinals() == [1, 2, 3, 4]


def test_a_restarted_delivery_goes_on_where_it_was(triggers: Triggers, tmp_path: Path) -> None:
    sink = FileSink(tmp_path, feed=Feed.DELTAS, ordered=True)
    for vector in "abc":
        triggers.commit((vector, 1))
        delivery = delivery_of(triggers, sink, folder=tmp_path)
        delivery.start()
        assert delivery.drain(10)
        delivery.stop()
    assert [(line["first"], line["last"]) for line in sink.lines()] == [(0, 0), (1, 1), (2, 2)]


def test_a_sink_behind_gets_triggers_together_and_each_vector_once(
    triggers: Triggers, tmp_path: Path
) -> None:
    for revision in range(1, 6):
        triggers.commit(("a", revision), (f"b{revision}", 1))
    sink = FileSink(tmp_path, feed=Feed.STATES | Feed.DELTAS, ordered=True)
    delivery = delivery_of(triggers, sink, folder=tmp_path)
    delivery.start()
    assert delivery.drain(10)
    delivery.stop()
    (line,) = sink.lines()
    assert (line["first"], line["last"]) == (0, 4)
    assert sorted(line["s"]) == [["a", 5], *([f"b{n}", 1] for n in range(1, 6))]
    assert line["d"] == list(range(1, 11))
    assert delivery.workers[0].runner.meter.coalesced == 4


def test_a_write_is_bounded_but_never_less_than_a_trigger(
    triggers: Triggers, tmp_path: Path
) -> None:
    for count in (1, 1, 3, 1):
        triggers.commit(*((f"v{triggers.ordinal}-{n}", 1) for n in range(count)))
    sink = FileSink(tmp_path, feed=Feed.DELTAS, ordered=True)
    options = DeliveryOptions(rows_per_write_max=2)
    delivery = delivery_of(triggers, sink, folder=tmp_path, options=options)
    delivery.start()
    assert delivery.drain(10)
    delivery.stop()
    assert [line["d"] for line in sink.lines()] == [[1, 2], [3, 4, 5], [6]]


def test_urgent_states_pass_earlier_ones_in_an_unordered_sink(
    triggers: Triggers, tmp_path: Path
) -> None:
    triggers.commit(("low", 1, 3), ("shared", 1, 3))
    triggers.commit(("normal", 1, 2))
    triggers.commit(("critical", 1, 0), ("shared", 2, 0))
    sink = FileSink(tmp_path)
    delivery = delivery_of(triggers, sink, folder=tmp_path)
    delivery.start()
    assert delivery.drain(10)
    delivery.stop()
    assert [[name for name, _ in line["s"]] for line in sink.lines()] == [
        ["critical", "shared"], ["normal"], ["low"],
    ]  # fmt: skip
    assert sink.states()["shared"] == 2
    saved = CursorFile(triggers.log.store, "file").load()
    assert saved is not None and saved.position == (2, 2, 2, 2)


def test_urgent_states_pass_nothing_in_an_ordered_sink(triggers: Triggers, tmp_path: Path) -> None:
    triggers.commit(("low", 1, 3))
    triggers.commit(("critical", 1, 0))
    sink = FileSink(tmp_path, ordered=True)
    options = DeliveryOptions(rows_per_write_max=1)
    delivery = delivery_of(triggers, sink, folder=tmp_path, options=options)
    delivery.start()
    assert delivery.drain(10)
    delivery.stop()
    assert [line["s"] for line in sink.lines()] == [[["low", 1]], [["critical", 1]]]


def test_few_rows_of_all_lanes_go_in_one_write(triggers: Triggers, tmp_path: Path) -> None:
    triggers.commit(*((f"v{lane}", 1, lane) for lane in range(4)))
    sink = FileSink(tmp_path)
    delivery = delivery_of(triggers, sink, folder=tmp_path, options=DeliveryOptions())
    delivery.start()
    assert delivery.drain(10)
    delivery.stop()
    assert len(sink.lines()) == 1


def test_a_large_lane_is_written_in_pieces(triggers: Triggers, tmp_path: Path) -> None:
    triggers.commit(*((f"v{n}", 1) for n in range(7)))
    sink = FileSink(tmp_path)
    options = DeliveryOptions(rows_per_write_max=3, rows_together_max=1)
    delivery = delivery_of(triggers, sink, folder=tmp_path, options=options)
    delivery.start()
    assert delivery.drain(10)
    delivery.stop()
    assert [len(line["s"]) for line in sink.lines()] == [3, 3, 1]


def test_triggers_go_when_every_sink_is_past_them(triggers: Triggers, tmp_path: Path) -> None:
    for revision in range(1, 4):
        triggers.commit(("a", revision))
    quick = FileSink(tmp_path, name="quick")
    broken = FileSink(tmp_path, name="broken")
    broken.failures = 5
    delivery = delivery_of(triggers, quick, broken, folder=tmp_path)
    delivery.start()
    eventually(lambda: quick.states() == {"a": 3})
    assert (triggers.log.first, triggers.log.last) == (0, 2) or broken.failures < 5
    assert delivery.drain(10)
    delivery.stop()
    assert (triggers.log.first, triggers.log.last) == (2, 2)
    assert len(triggers.log.store.names("changes/data")) == 1


def test_a_sink_that_opens_before_the_first_trigger_is_well(
    triggers: Triggers, tmp_path: Path
) -> None:
    sink = FileSink(tmp_path)
    delivery = delivery_of(triggers, sink, folder=tmp_path)
    delivery.start()
    eventually(lambda: sink.opened == 1 and delivery.workers[0].state == "idle")
    triggers.commit(("a", 1))
    assert delivery.drain(10)
    delivery.stop()
    assert [one["retries"] for one in delivery.status()["sinks"]] == [0, 0]


def test_empty_triggers_move_the_cursor_without_a_write(triggers: Triggers, tmp_path: Path) -> None:
    for _ in range(3):
        triggers.commit()
    sink = FileSink(tmp_path, ordered=True)
    delivery = delivery_of(triggers, sink, folder=tmp_path)
    delivery.start()
    assert delivery.drain(10)
    delivery.stop()
    assert sink.lines() == []
    assert json.loads((tmp_path / "sinks" / "00000000-file.json").read_text())["position"] == [2]


def test_the_status_file_tells_of_sinks_and_changes(triggers: Triggers, tmp_path: Path) -> None:
    triggers.commit(("a", 1), log_time_ms=1)
    sink = FileSink(tmp_path)
    delivery = delivery_of(triggers, sink, folder=tmp_path, name="tests", describe=lambda: {"x": 1})
    delivery.start()
    assert delivery.drain(10)
    delivery.stop()
    status = read_status(triggers.log.store)
    assert (status["pipeline"], status["state"], status["source"]) == ("tests", "stopped", {"x": 1})
    assert status["changes"]["last"] == 0
    assert status["partitions"][0]["sequence"] == 100
    found = {sink["name"]: sink for sink in status["sinks"]}
    assert set(found) == {"file", "_quarantine"}
    assert (found["file"]["rows"], found["file"]["lag"]["rows"]) == (1, 0)
    assert found["file"]["visible_s"]["max"] > 1e9


def test_a_sink_that_hangs_stops_neither_others_nor_the_end(
    triggers: Triggers, tmp_path: Path
) -> None:
    import threading

    triggers.commit(("a", 1))
    hanging, well = FileSink(tmp_path, name="hanging"), FileSink(tmp_path, name="well")
    hanging.hang = threading.Event()
    options = DeliveryOptions(hang_s=0.01, poll_s=0.05, status_s=0.05)
    delivery = delivery_of(triggers, hanging, well, folder=tmp_path, options=options)
    delivery.start()
    eventually(lambda: delivery.workers[1].caught_up(0))
    eventually(lambda: delivery.status()["sinks"][0]["state"] == "hanging")
    assert delivery.stop(timeout_s=0.1) == ["hanging"]
    hanging.hang.set()
    eventually(lambda: delivery.workers[0].state == "stopped")
    assert hanging.states() == {"a": 1}  # it came through after all,
    assert delivery.workers[0].durable_through == -1  # but nobody moves the cursor any more


def test_what_some_sink_has_still_to_take_is_counted(tmp_path: Path) -> None:
    triggers = Triggers(tmp_path)
    triggers.commit(("a", 1), ("b", 1))
    (part,) = triggers.log.manifest(0).parts
    sink = FileSink(tmp_path)
    sink.hang = threading.Event()
    delivery = delivery_of(triggers, sink, folder=tmp_path)
    delivery.start()
    assert delivery.undelivered_bytes == part.bytes
    sink.hang.set()
    assert delivery.drain(20)
    delivery.stop()
    assert delivery.undelivered_bytes == 0
