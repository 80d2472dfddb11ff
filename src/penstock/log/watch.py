"""Whoever comes upon damage in a log, its owner hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from penstock.errors import Corruption

T = TypeVar("T")


def _nobody(_: Corruption) -> None:
    """Nobody owns the log yet, or any more."""


class Watch:
    """A context that tells of the damage which is met in it. It is raised all the same."""

    __slots__ = ("tell",)

    def __init__(self) -> None:
        self.tell: Callable[[Corruption], None] = _nobody  # on whichever thread reads

    def __enter__(self) -> None:
        """Nothing is to be done before."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if isinstance(error, Corruption):
            self.tell(error)

    def over(self, steps: Iterator[T]) -> Iterator[T]:
        """The same for what is read step by step."""
        with self:
            yield from steps

    def end(self) -> None:
        self.tell = _nobody
