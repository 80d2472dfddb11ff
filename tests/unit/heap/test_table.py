import numpy as np
import pytest

from penstock.errors import Corruption
from penstock.heap.table import ALIVE, ALLOWED, FOLLOWS, PAGE, MessageState, MessageTable, mask_of


def test_every_state_says_what_follows_it() -> None:
    assert FOLLOWS.keys() == set(MessageState)


def test_allowed_is_the_same_table_by_target() -> None:
    for start in MessageState:
        for to in MessageState:
            assert ALLOWED[to][start] == (to in FOLLOWS[start])


def test_nothing_leads_out_of_done_or_back_to_none() -> None:
    assert not FOLLOWS[MessageState.DONE]
    assert all(MessageState.NONE not in after for after in FOLLOWS.values())


def test_every_living_state_can_end() -> None:
    assert all(MessageState.DONE in FOLLOWS[state] for state in ALIVE)


def test_mask_is_a_lookup() -> None:
    mask = mask_of(ALIVE)
    assert [bool(mask[state]) for state in MessageState] == [
        state in ALIVE for state in MessageState
    ]


def enter(
    table: MessageTable, first: int, count: int, state: MessageState = MessageState.READY
) -> None:
    for at, _ in table.open_range(first, count):
        table.enter(at, np.full(at.stop - at.start, state, np.uint8))


def sequences(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_a_sequence_that_is_no_message_reads_as_none() -> None:
    table = MessageTable()
    assert table.states(sequences(0, 1, 10**12)).tolist() == [MessageState.NONE] * 3
    enter(table, 5 * PAGE, 1)
    assert table.states(sequences(1, 5 * PAGE, 5 * PAGE + 1, 10**12)).tolist() == [0, 1, 0, 0]
    assert table.state_of(10**12) == MessageState.NONE


def test_a_range_crosses_pages() -> None:
    table = MessageTable()
    parts = []
    for at, part in table.open_range(PAGE - 2, PAGE + 4):
        table.enter(at, np.full(at.stop - at.start, MessageState.READY, np.uint8))
        parts.append((part.start, part.stop))
    assert parts == [(0, 2), (2, PAGE + 2), (PAGE + 2, PAGE + 4)]
    assert table.counts[MessageState.READY] == PAGE + 4
    table.validate()


def test_memory_follows_the_living_not_the_history() -> None:
    table = MessageTable()
    enter(table, 1, 1)
    for page in range(1, 400):
        enter(table, page * PAGE, PAGE)
        table.move(
            table.places(np.arange(page * PAGE, (page + 1) * PAGE, dtype=np.uint64)),
            MessageState.DONE,
        )
    assert len(table.living) < 10
    assert table.all_in(ALIVE).tolist() == [1]
    table.validate()


def test_a_freed_row_comes_back_clean() -> None:
    table = MessageTable()
    enter(table, 1, 3)
    at = table.places(sequences(1, 2, 3))
    table.attempts[at] = 9
    enter(table, PAGE, 1)
    table.move(at, MessageState.DONE)
    enter(table, 2 * PAGE, 3)
    again = table.places(sequences(2 * PAGE, 2 * PAGE + 1, 2 * PAGE + 2))
    assert again.tolist() == [at[0] - 1, at[0], at[0] + 1]
    assert not table.attempts[again].any()


def test_an_illegal_move_changes_nothing() -> None:
    table = MessageTable()
    enter(table, 1, 2)
    table.move(table.places(sequences(1)), MessageState.DEAD)
    with pytest.raises(Corruption, match="DEAD to LEASED"):
        table.move(table.places(sequences(1, 2)), MessageState.LEASED)
    assert table.states(sequences(1, 2)).tolist() == [MessageState.DEAD, MessageState.READY]
    table.validate()


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_not_there_cannot_move(count: int) -> None:
    table = MessageTable()
    with pytest.raises(Corruption, match="NONE to READY"):
        table.move(table.places(np.arange(count, dtype=np.uint64)), MessageState.READY)
    table.validate()


def test_a_message_enters_once() -> None:
    table = MessageTable()
    enter(table, 1, 4)
    with pytest.raises(Corruption):
        enter(table, 4, 1)
    with pytest.raises(Corruption):
        table.enter_one(2, key=0, time_ms=0, limit=0)


def test_scan_goes_on_after_a_sequence() -> None:
    table = MessageTable()
    enter(table, 1, 3)
    enter(table, 100 * PAGE, 2, MessageState.PREPARED)
    assert table.all_in(frozenset({MessageState.READY})).tolist() == [1, 2, 3]
    found = np.concatenate(list(table.scan(ALIVE, after=2)))
    assert found.tolist() == [3, 100 * PAGE, 100 * PAGE + 1]


def test_scattered_messages_enter_together() -> None:
    table = MessageTable()
    some = np.arange(1, 3 * PAGE * 40, 3000, dtype=np.uint64)
    at = table.open_scattered(some)
    table.enter(at, np.full(len(some), MessageState.READY, np.uint8))
    assert table.all_in(ALIVE).tolist() == some.tolist()
    table.validate()
