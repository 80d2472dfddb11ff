"""The answer to a forwarded request: gathered until each of its parts has an outcome."""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.node.requests import Reply
from penstock.wire.messages import Enqueued, Forwarded, Outcome


class Outcomes:
    def __init__(self, parts: int, reply: Reply) -> None:
        self._outcomes = [Outcome()] * parts
        self._remaining, self._reply = parts, reply

    def part(self, index: int) -> Reply:
        """What takes the result of one part: where its entries are, lost positions, an error."""

        def done(result: object) -> None:
            self._outcomes[index] = _outcome(result)
            self._remaining -= 1
            if not self._remaining:
                self._reply(Forwarded(self._outcomes))

        return done


def _outcome(result: object) -> Outcome:
    if isinstance(result, PenstockError):
        return Outcome(error=result.to_wire())
    if isinstance(result, Enqueued):
        return Outcome(result.placed, result.duplicates)
    if isinstance(result, list):
        return Outcome(lost=result)
    raise TypeError(f"a part of a request cannot end in {result!r}")
