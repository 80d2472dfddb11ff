from tests.unit.replication.parts import facts

from penstock.replication.effects import Ack, Follow
from penstock.replication.facts import ReplicationOptions
from penstock.replication.sender import SendWindow, StreamSender, answer

OPTIONS = ReplicationOptions(lagging_ms=100, silence_ms=50)


def follow(*tail: tuple[int, int], entries: int = 4, size: int = 100) -> Follow:
    return Follow("b", "b-disk", 1, 1, 0, list(tail), entries, size)


def sender(*, matched: int = 0, entries: int = 4) -> StreamSender:
    return StreamSender(follow(entries=entries), matched=matched, now=0)


def ack(entries: int, durable: int) -> Ack:
    return Ack("b", "b-disk", 1, 1, entries, entries, durable, 1)


def test_a_window_begins_where_the_logs_part() -> None:
    assert sender(matched=2).window(facts(1, 1, 1), through=3) == SendWindow(3, 3, 4, 100)
    assert sender(matched=3).window(facts(1, 1, 1), through=3) is None


def test_nothing_counts_before_it_is_acknowledged() -> None:
    stream = sender(matched=2)
    assert stream.durable == 0
    stream.on_ack(ack(0, 2), 0)
    assert stream.durable == 2


def test_no_more_counts_than_was_sent() -> None:
    stream = sender()
    stream.on_sent(2, entries=2, bytes=2, now=0)
    stream.on_ack(ack(2, 9), 0)
    assert stream.durable == 2


def test_a_late_acknowledgement_takes_nothing_back() -> None:
    stream = sender()
    stream.on_sent(2, entries=2, bytes=2, now=0)
    stream.on_ack(ack(2, 2), 10)
    stream.on_ack(ack(1, 1), 5)
    assert (stream.durable, stream.heard_ms, stream.credit.entries) == (2, 10, 4)


def test_credit_that_runs_out_is_told_once_then_lagging_then_resumed() -> None:
    stream = sender(entries=5)
    assert stream.on_sent(4, entries=4, bytes=4, now=0) == []
    assert stream.on_sent(5, entries=1, bytes=1, now=0) == ["credit_low", "credit_exhausted"]
    assert stream.on_tick(OPTIONS, 100) == []
    assert stream.on_tick(OPTIONS, 101) == ["lagging"]
    assert stream.on_tick(OPTIONS, 102) == []
    assert stream.on_ack(ack(5, 5), 103) == ["resumed"]


def test_a_reader_that_is_not_heard_is_not_alive() -> None:
    stream = sender()
    assert stream.alive(OPTIONS, 50)
    assert not stream.alive(OPTIONS, 51)


def test_an_answer_says_where_the_logs_part() -> None:
    reply = answer(follow((1, 2), (2, 4)), facts(1, 1, 1), epoch=3, node="a", committed=1)
    assert (reply.matched, reply.committed, reply.reseed) == (2, 1, False)


def test_who_has_nothing_is_sent_everything() -> None:
    assert answer(follow(), facts(1), epoch=1, node="a", committed=0).matched == 0


def test_what_is_no_longer_as_written_cannot_be_streamed() -> None:
    short = facts(1, 1, 1, 1, first=3)
    assert answer(follow((1, 1)), short, epoch=1, node="a", committed=0).reseed
    assert answer(follow(), short, epoch=1, node="a", committed=0).reseed
    assert answer(follow((1, 2)), short, epoch=1, node="a", committed=0).matched == 2
