"""What every sink promises; see penstock.sinks.protocol."""

import numpy as np
import pytest
from tests.conformance.sinks.changes import State, Triggers, held, opened, states, work
from tests.conformance.sinks.conftest import Place

from penstock.errors import SinkRejected, Unsupported
from penstock.sinks.protocol import Feed, Sink


def test_it_is_a_sink(place: Place) -> None:
    sink = place.sink()
    assert isinstance(sink, Sink)
    assert sink.feed & (Feed.STATES | Feed.DELTAS)
    assert sink.ordered or sink.feed == Feed.STATES


def test_a_trigger_again_changes_nothing(place: Place) -> None:
    triggers = Triggers.of(2)
    with opened(place.sink()) as sink:
        sink.write(triggers.work(0))
        sink.write(triggers.work(1))
    once = place.effect()
    assert once

    with opened(place.sink()) as sink:
        sink.write(triggers.work(1))
        sink.write(triggers.work(1))
    assert place.effect() == once


def test_an_older_trigger_again_changes_nothing(place: Place) -> None:
    triggers = Triggers.of(3)
    with opened(place.sink()) as sink:
        for trigger in range(3):
            sink.write(triggers.work(trigger))
        once = place.effect()
        sink.write(triggers.work(0))
        sink.write(triggers.work(0, 1))
    assert place.effect() == once


def test_it_does_not_matter_how_triggers_are_cut(place: Place) -> None:
    """A crash before the cursor moved: the same triggers come again, with others beside them."""
    triggers = Triggers.of(5)
    with opened(place.sink()) as sink:
        sink.write(triggers.work(0, 2))
    with opened(place.sink()) as sink:
        sink.write(triggers.work(0))
        sink.write(triggers.work(1, 3))
        sink.write(triggers.work(3, 4))
    crashed = place.effect()

    smooth = Triggers.of(5)
    assert len(crashed) == len(set(map(str, crashed)))
    if place.sink().feed & Feed.STATES:
        newest = {row["vector_id"]: row["revision"] for row in smooth.work(0, 4).states.to_pylist()}
        with opened(place.sink()) as sink:
            assert {row[1]: row[2] for row in held(sink)} == newest
    if place.sink().feed & Feed.DELTAS:
        released = sum(len(table) for _, table in smooth.each)
        assert len([row for row in crashed if _is_delta(row)]) == released


def _is_delta(row: object) -> bool:
    return not (isinstance(row, tuple) and len(row) == 5)


def test_work_without_rows_is_nothing(place: Place) -> None:
    triggers = Triggers.of(1)
    full = triggers.work(0)
    with opened(place.sink()) as sink:
        sink.write(work(0, full.states.slice(0, 0)))
        sink.write(work(1, full.deltas.slice(0, 0)))
        assert sink.cursor() is None
    assert place.effect() == []


def test_what_was_written_is_scanned_bit_for_bit(with_state: Place) -> None:
    tiny = float(np.float32(1e-45))
    rows = [
        State(vector_id="a", revision=1, values=(0.1, -0.0, tiny, 3e38)),
        State(vector_id="b", revision=7, metadata={"name": "ü", "list": [1, 2.5, None]}),
        State(vector_id="a", revision=2, namespace="other", metadata={}),
    ]
    with opened(with_state.sink()) as sink:
        sink.write(work(0, states(*rows)))
        found = {row[:2]: row[2:] for row in held(sink)}
    assert found == {
        (row.namespace, row.vector_id): (
            row.revision,
            np.array(row.values, np.float32).tobytes(),
            row.metadata,
        )
        for row in rows
    }


def test_names_are_kept_apart(with_state: Place) -> None:
    names = [("a", "b:c"), ("a:b", "c"), ("a%3Ab", "c"), ("it's", "'; --"), ("*", "?[x]\n é")]
    rows = [
        State(namespace=namespace, vector_id=vector_id, revision=number + 1)
        for number, (namespace, vector_id) in enumerate(names)
    ]
    with opened(with_state.sink()) as sink:
        sink.write(work(0, states(*rows)))
        assert {row[:2]: row[2] for row in held(sink)} == {
            name: number + 1 for number, name in enumerate(names)
        }


def test_an_older_revision_never_wins(with_state: Place) -> None:
    with opened(with_state.sink()) as sink:
        sink.write(work(0, states(State(vector_id="a", revision=5, values=(5.0, 0, 0, 0)))))
        sink.write(work(1, states(State(vector_id="a", revision=3, values=(3.0, 0, 0, 0)))))
        sink.write(work(2, states(State(vector_id="a", revision=4, deleted=True))))
        ((_, _, revision, values, _),) = held(sink)
    assert (revision, np.frombuffer(values, np.float32)[0]) == (5, 5.0)


def test_a_deleted_vector_stays_so_until_it_is_created_anew(with_state: Place) -> None:
    with opened(with_state.sink()) as sink:
        sink.write(work(0, states(State(vector_id="a", revision=1))))
        sink.write(work(1, states(State(vector_id="a", revision=4, deleted=True))))
        assert held(sink) == []
        sink.write(work(2, states(State(vector_id="a", revision=3))))
        assert held(sink) == []
    with opened(with_state.sink()) as sink:
        assert held(sink) == []
        sink.write(work(3, states(State(vector_id="a", revision=5))))
        assert [row[2] for row in held(sink)] == [5]


def test_deleting_what_was_never_there_keeps_it_away(with_state: Place) -> None:
    with opened(with_state.sink()) as sink:
        gone = State(vector_id="a", revision=2, deleted=True)
        sink.write(work(0, states(gone, State(vector_id="b", revision=1))))
        sink.write(work(1, states(State(vector_id="a", revision=1))))
        assert [row[1] for row in held(sink)] == ["b"]


def test_vectors_of_several_dimensions(with_state: Place) -> None:
    with opened(with_state.sink()) as sink:
        sink.write(work(0, states(State(vector_id="a", revision=1, values=(1.0, 2.0)))))
        sink.write(work(1, states(State(vector_id="b", revision=1, values=(1.0, 2.0, 3.0)))))
        assert {row[1]: len(row[3]) // 4 for row in held(sink)} == {"a": 2, "b": 3}


def test_reset_empties_it_for_the_same_triggers(with_state: Place) -> None:
    triggers = Triggers.of(2)
    with opened(with_state.sink()) as sink:
        sink.write(triggers.work(0, 1))
        once = held(sink)
        sink.reset()
        assert held(sink) == []
        assert sink.cursor() is None
    assert with_state.effect() == []
    with opened(with_state.sink()) as sink:
        sink.write(triggers.work(0, 1))
        assert held(sink) == once


def test_without_state_there_is_nothing_to_scan_or_reset(without: Place) -> None:
    with opened(without.sink()) as sink:
        with pytest.raises(Unsupported):
            sink.scan()
        with pytest.raises(Unsupported):
            sink.reset()


def test_rows_that_cannot_be_taken_are_told_and_the_others_written(refusing: Place) -> None:
    bad = refusing.bad()  # type: ignore[attr-defined]
    for _ in range(2):
        with opened(refusing.sink()) as sink, pytest.raises(SinkRejected) as refused:
            sink.write(work(0, bad))
        assert refused.value.rows == [1]
        assert refused.value.table == ("states" if "vector" in bad.schema.names else "deltas")
        assert len(refusing.effect()) == 2
