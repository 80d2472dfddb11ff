import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.replication.sender import Credit


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(1, 50))))
def test_credit_is_never_negative_and_all_comes_back(moves: list[tuple[bool, int, int]]) -> None:
    credit = Credit(entries=7, bytes=100)
    for send, entries, size in moves:
        if send and not credit.exhausted:
            credit.on_sent(entries, size)
        elif not send:
            credit.on_received(
                min(credit.entries_received + entries, credit.entries_sent),
                min(credit.bytes_received + size, credit.bytes_sent),
            )
        assert credit.entries >= 0
        assert credit.bytes >= 0
        assert credit.entries_out < 7 + 5  # overdrawn by one batch, never by two
    credit.on_received(credit.entries_sent, credit.bytes_sent)
    assert (credit.entries, credit.bytes) == (7, 100)


def test_nothing_is_sent_without_credit() -> None:
    credit = Credit(entries=2, bytes=100)
    credit.on_sent(2, 10)
    with pytest.raises(RuntimeError, match="credit"):
        credit.on_sent(1, 1)


def test_a_total_that_comes_late_or_twice_does_no_harm() -> None:
    credit = Credit(entries=10, bytes=100)
    credit.on_sent(6, 60)
    for total in (4, 4, 2):
        credit.on_received(total, total * 10)
    assert credit.entries == 8


def test_more_than_was_sent_cannot_be_received() -> None:
    credit = Credit(entries=10, bytes=100)
    credit.on_sent(1, 10)
    assert not credit.covers(2, 10)
    with pytest.raises(ValueError, match="2 entries received, 1 sent"):
        credit.on_received(2, 10)


def test_below_a_fifth_is_low() -> None:
    credit = Credit(entries=10, bytes=1000)
    credit.on_sent(8, 8)
    assert not credit.low
    credit.on_sent(1, 1)
    assert credit.low


@pytest.mark.parametrize(("entries", "size"), [(0, 1), (1, 0)])
def test_a_window_is_not_empty(entries: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Credit(entries=entries, bytes=size)


def test_what_is_handled_is_given_back_and_no_more() -> None:
    credit = Credit(entries=10, bytes=100)
    credit.use(4, 120)
    assert (credit.entries, credit.bytes, credit.utilisation) == (6, 0, pytest.approx(1.2))
    credit.give_back(3, 20)
    assert (credit.entries_out, credit.utilisation) == (1, 1.0)
    for entries, size in ((2, 0), (0, 101), (-1, 0), (0, -1)):
        with pytest.raises(InvalidArgument):
            credit.give_back(entries, size)
    credit.give_back(1, 0)
    assert credit.bytes == 1, "with no entry under way, a lone one may go"
