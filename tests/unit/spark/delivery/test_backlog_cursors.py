"""Cursors: what they say, how they are saved, and whom to believe."""

import json
from pathlib import Path

import pytest

from penstock.errors import Corruption
from penstock.sinks.protocol import SinkMark
from penstock.spark.delivery.backlog import CursorFile, SinkCursor
from penstock.spark.store import FolderStore


def mark(trigger: int, *, claim: int = 0, incarnation: str = "") -> SinkMark:
    return SinkMark(position=(trigger,), claim=claim, incarnation=incarnation)


def test_a_saved_cursor_is_read_back(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    file = CursorFile(store, "lake", claim=3)
    assert file.load() is None
    cursor = SinkCursor(position=(4,), started=2, attempt=(5, 7), told=mark(4))
    file.save(cursor)
    CursorFile(store, "the-lake", claim=9).save(SinkCursor(position=(99,)))
    assert CursorFile(store, "lake").load() == cursor
    document = json.loads((tmp_path / "sinks/00000003-lake.json").read_text())
    assert (document["version"], document["sink"]) == (3, "lake")


def test_a_driver_that_was_overtaken_moves_only_its_own_cursor(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    zombie, driver = (CursorFile(store, "lake", claim=claim) for claim in (1, 2))
    zombie.save(SinkCursor(position=(4,)))
    assert driver.load() == SinkCursor(position=(4,))
    driver.save(SinkCursor(position=(5,)))
    assert store.names("sinks") == ["00000002-lake.json"]
    zombie.save(SinkCursor(position=(9,)))  # it wakes up, and has written four more triggers
    assert CursorFile(store, "lake", claim=3).load() == SinkCursor(position=(5,))
    assert driver.furthest() == SinkCursor(position=(9,))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "not a cursor"),
        (b'{"version": 1}', "not a cursor"),
        (b'{"version": 9, "position": [1], "started": 0, "attempt": null, "told": null}', "9"),
        (
            b'{"version": 3, "position": [1, 2], "started": 0, "attempt": null, "told": null}',
            "2 lanes",
        ),
    ],
)
def test_a_file_that_is_no_cursor_is_refused(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    store = FolderStore(tmp_path)
    store.write("sinks/00000001-x.json", [content])
    with pytest.raises(Corruption, match=complaint):
        CursorFile(store, "x").load()


def test_lanes_advance_apart_and_never_back() -> None:
    cursor = SinkCursor.before(3, lanes=4).advanced({0: 9, 2: 5})
    assert (cursor.position, cursor.through, cursor.started) == ((9, 2, 5, 2), 2, 3)
    with pytest.raises(AssertionError):
        cursor.advanced({0: 8})


def test_an_attempt_ends_with_the_next_advance() -> None:
    cursor = SinkCursor.before(0, lanes=1).attempting(0, 3)
    assert cursor.attempt == (0, 3)
    assert cursor.advanced({0: 3}).attempt is None


@pytest.mark.parametrize(
    ("cursor", "held", "position", "attempt"),
    [
        # nobody knows better than the file
        (SinkCursor(position=(4,)), None, 4, None),
        # the process died between the write and the cursor: the attempt is offered again
        (SinkCursor(position=(4,), attempt=(5, 7), told=mark(4)), 7, 4, (5, 7)),
        # ... and before the write
        (SinkCursor(position=(4,), attempt=(5, 7), told=mark(4)), 4, 4, (5, 7)),
        # triggers without a row for it moved the file on, not the sink
        (SinkCursor(position=(9,), told=mark(4)), 4, 9, None),
        # the file is old or new: the sink has more than it says
        (SinkCursor(position=(4,)), 9, 9, None),
        # rows have gone from the sink
        (SinkCursor(position=(9,), told=mark(8)), 5, 5, None),
        (SinkCursor(position=(9,), told=mark(8), attempt=(10, 11)), None, -1, None),
    ],
)
def test_a_sink_with_a_cursor_of_its_own_wins(
    cursor: SinkCursor, held: int | None, position: int, attempt: tuple[int, int] | None
) -> None:
    found = cursor.reconciled(None if held is None else mark(held))
    assert (found.position, found.attempt) == ((position,), attempt)


@pytest.mark.parametrize(
    ("held", "position"),
    [
        # what the driver was told, and what it wrote since
        (mark(8, claim=2, incarnation="a"), 9),
        (mark(9, claim=2, incarnation="a"), 9),
        # a driver that came later knows better, whatever its position
        (mark(5, claim=3, incarnation="a"), 9),
        # an older copy, of the time of this driver and of an earlier one
        (mark(5, claim=2, incarnation="a"), 5),
        (mark(5, claim=1, incarnation="a"), 5),
        # an overtaken driver went on in an older copy
        (mark(30, claim=1, incarnation="a"), 9),
        # another store, or one that somebody emptied and filled
        (mark(30, claim=2, incarnation="b"), -1),
        (mark(30, claim=3), -1),
        (None, -1),
    ],
)
def test_a_mark_tells_a_store_that_lost_rows_from_one_that_went_on(
    held: SinkMark | None, position: int
) -> None:
    cursor = SinkCursor(position=(9,), told=mark(8, claim=2, incarnation="a"))
    found = cursor.reconciled(held)
    assert (found.position, found.told) == ((position,), held)
    whole = held is not None and held.incarnation == "a" and (held.claim, *held.position) >= (2, 8)
    assert cursor.lost_by(held) is not whole


def test_marks_of_one_number_and_of_four_are_compared_by_the_slowest_lane() -> None:
    laned = SinkMark(position=(9, 9, 4, 9))
    assert mark(4).kept_by(laned)
    assert not mark(5).kept_by(laned)
    assert not laned.kept_by(mark(4))
    assert laned.kept_by(mark(9))


def test_a_sink_that_becomes_ordered_begins_with_its_slowest_lane() -> None:
    assert SinkCursor(position=(9, 9, 5, 7)).in_lanes(1).position == (5,)
    assert SinkCursor(position=(6,)).in_lanes(4).position == (6, 6, 6, 6)
