"""What is sent in one turn is written once, in order, and nothing of it is lost by closing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from penstock.model.columns import Buffer
from penstock.wire.frame import GATHER_BYTES_MAX, Outbox


class Recorder:
    """A transport that notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []
        self.closing = False

    def writelines(self, list_of_data: Iterable[Buffer], /) -> None:
        self.done.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.done.append("close")
        self.closing = True

    def abort(self) -> None:
        self.done.append("abort")
        self.closing = True

    def pause_reading(self) -> None:
        self.done.append("pause")

    def resume_reading(self) -> None:
        self.done.append("resume")

    def get_write_buffer_size(self) -> int:
        return 100


class Turn:
    def __init__(self) -> None:
        self.transport = Recorder()
        self.later: list[Callable[[], None]] = []
        self.outbox = Outbox(self.transport, self.later.append)

    def end(self) -> None:
        later, self.later[:] = list(self.later), []
        for callback in later:
            callback()


@pytest.fixture
def turn() -> Turn:
    return Turn()


def test_what_is_sent_in_one_turn_is_written_once(turn: Turn) -> None:
    turn.outbox.writelines([b"a", b"b"])
    turn.outbox.writelines([b"c"])
    assert turn.transport.done == []
    turn.end()
    turn.outbox.writelines([b"d"])
    turn.end()
    assert turn.transport.done == [b"abc", b"d"]


def test_much_is_written_at_once(turn: Turn) -> None:
    turn.outbox.writelines([b"x"])
    turn.outbox.writelines([bytes(GATHER_BYTES_MAX)])
    assert turn.transport.done == [b"x" + bytes(GATHER_BYTES_MAX)]
    turn.end()
    assert len(turn.transport.done) == 1


def test_closing_comes_after_what_was_sent(turn: Turn) -> None:
    turn.outbox.writelines([b"last words"])
    turn.outbox.close()
    turn.end()
    assert turn.transport.done == [b"last words", "close"]


def test_nothing_is_written_to_a_lost_connection(turn: Turn) -> None:
    turn.outbox.writelines([b"a"])
    turn.transport.closing = True
    turn.end()
    turn.outbox.writelines([b"b"])
    turn.outbox.abort()
    turn.end()
    assert turn.transport.done == ["abort"]


def test_reading_is_the_transport_s_own(turn: Turn) -> None:
    turn.outbox.pause_reading()
    turn.outbox.resume_reading()
    assert turn.transport.done == ["pause", "resume"]


def test_what_is_gathered_is_not_sent_yet(turn: Turn) -> None:
    turn.outbox.writelines([b"abc"])
    assert turn.outbox.get_write_buffer_size() == 103
    turn.end()
    assert turn.outbox.get_write_buffer_size() == 100
