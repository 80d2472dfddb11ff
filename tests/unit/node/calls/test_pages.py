"""How much of a list an answer holds."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.node.calls.pages import page_of
from penstock.wire.messages import PAGE_BYTES_MAX


def rows(size: int, made: list[str]) -> Iterator[tuple[str, str]]:
    """Endless rows of so many bytes each; `made` has the names of those that were asked for."""
    for number in range(1 << 30):
        made.append(f"{number:06}")
        yield made[-1], "x" * size


def test_a_page_holds_a_mebibyte_and_makes_one_row_more() -> None:
    made: list[str] = []
    page = page_of(rows(1000, made))
    size = sum(len(msgspec.msgpack.encode(row)) for row in page.rows)
    assert PAGE_BYTES_MAX - 1003 < size <= PAGE_BYTES_MAX
    assert page.next == made[-2] and len(made) == len(page.rows) + 1


def test_a_row_that_is_larger_by_itself_is_a_page() -> None:
    page = page_of(rows(2 * PAGE_BYTES_MAX, []))
    assert len(page.rows) == 1 and page.next == "000000"


def test_the_last_page_has_no_next() -> None:
    assert page_of([("a", 1), ("b", 2)]).next is None
    assert page_of([("a", 1), ("b", 2)], more=True).next == "b"
    assert page_of([]).next is None
