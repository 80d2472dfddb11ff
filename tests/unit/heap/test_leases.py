from collections.abc import Callable

import numpy as np

from penstock.heap.leases import LeaseBook, LeaseRun

Array = Callable[..., np.ndarray]


def granted(book: LeaseBook, first: int, n: int, *, consumer: bytes = b"c", ms: int = 100) -> None:
    messages = np.arange(1000 + first, 1000 + first + n, dtype=np.uint64)
    book.grant(LeaseRun(first, messages, consumer=consumer, visibility_ms=ms, granted_ms=0))


def held(book: LeaseBook, tokens: np.ndarray) -> list[int]:
    found: list[int] = []
    for stretch in book.stretches(tokens):
        found += tokens[stretch.at].tolist()
    return sorted(found)


def end(book: LeaseBook, tokens: np.ndarray) -> dict[bytes, int]:
    released: dict[bytes, int] = {}
    for stretch in book.stretches(tokens):
        book.release(stretch, released)
    return released


def test_a_contiguous_range_is_one_stretch() -> None:
    book = LeaseBook()
    granted(book, 10, 100)
    (stretch,) = book.stretches(np.arange(20, 60, dtype=np.uint64))
    assert stretch.offsets == slice(10, 50)
    released: dict[bytes, int] = {}
    messages = book.release(stretch, released)
    assert messages.tolist() == list(range(1020, 1060))
    assert released == {b"c": 40}
    book.validate()


def test_tokens_in_any_order_and_twice_are_found_once(u64: Array) -> None:
    book = LeaseBook()
    granted(book, 10, 5)
    granted(book, 30, 5, consumer=b"d")
    tokens = u64(33, 10, 14, 33, 15, 9, 29, 35, 31, 10)
    assert held(book, tokens) == [10, 14, 31, 33]
    assert end(book, tokens) == {b"c": 2, b"d": 2}
    assert held(book, tokens) == []
    book.validate()


def test_tokens_that_no_log_has_are_not_held(u64: Array) -> None:
    book = LeaseBook()
    granted(book, 10, 3)
    for tokens in (u64(11, 2**63 + 20), u64(11, 360_000, 2**64 - 1, 2**63), u64(2**64 - 1, 11)):
        assert held(book, tokens) == [11]


def test_three_tokens_that_look_contiguous_by_their_ends(u64: Array) -> None:
    book = LeaseBook()
    granted(book, 1, 9)
    assert held(book, u64(1, 9, 3)) == [1, 3, 9]
    assert held(book, u64(3, 3, 5)) == [3, 5]


def test_finished_runs_are_forgotten() -> None:
    book = LeaseBook()
    for first in range(1, 2001):
        granted(book, first, 1)
    end(book, np.arange(1, 1990, dtype=np.uint64))
    assert len(book._runs) < 100
    assert [run.first for run in book.runs()] == list(range(1990, 2001))
    book.validate()


def test_leases_are_counted_by_consumer(u64: Array) -> None:
    book = LeaseBook()
    granted(book, 1, 3, consumer=b"a")
    granted(book, 4, 2, consumer=b"b")
    assert book.by_consumer == {b"a": 3, b"b": 2}
    end(book, u64(1, 2, 3, 4))
    assert book.by_consumer == {b"b": 1}


def test_expired_leases_are_named_until_they_are_settled(u64: Array) -> None:
    book = LeaseBook()
    granted(book, 1, 3, ms=100)
    granted(book, 9, 1, ms=50)
    assert book.next_ms() == 50
    assert book.expired(49, 10).tolist() == []
    assert book.expired(100, 2).tolist() == [9, 1]
    assert sorted(book.expired(100, 10).tolist()) == [1, 2, 3, 9]
    end(book, u64(1, 9))
    assert book.expired(100, 10).tolist() == [2, 3]
    assert book.next_ms() == 100
    book.validate()


def test_an_extension_only_makes_a_lease_longer(u64: Array) -> None:
    book = LeaseBook()
    granted(book, 1, 3, ms=100)
    book.extend(u64(2, 3, 77), u64(500, 10, 9).view(np.int64))
    assert book.expired(100, 10).tolist() == [1, 3]
    end(book, u64(1, 3))
    assert book.expired(100, 10).tolist() == []
    assert book.next_ms() == 500
    assert book.expired(500, 10).tolist() == [2]


def test_a_barrier_arms_every_lease_again(u64: Array) -> None:
    book = LeaseBook()
    granted(book, 1, 2, ms=100)
    granted(book, 5, 1, ms=10)
    book.extend(u64(2), u64(5000).view(np.int64))
    book.expired(50, 10)
    book.rearm(1000)
    assert book.expired(1009, 10).tolist() == []
    assert book.expired(1100, 10).tolist() == [5, 1]
    assert book.expired(5000, 10).tolist() == [5, 1, 2]
    book.validate()


def test_the_token_of_a_message_is_found_while_it_is_held(u64: Array) -> None:
    book = LeaseBook()
    granted(book, 1, 3)
    assert book.tokens_of({1002, 1003, 5}).tolist() == [2, 3]
    end(book, u64(2))
    assert book.tokens_of({1002}).tolist() == []
