"""Confirmation tokens: a destructive call is made in two steps, the first of which is harmless.

A token belongs to the caller that asked for it, and is for one call on one topic or key. A topic
that is deleted and made again under its name is another topic: tokens of the old one are void.
Nobody can use up what others need: a caller that asks for too many loses its own oldest ones, and
where all together are too many, the one that has most of them does.
"""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Final, NamedTuple

from penstock.errors import FailedPrecondition
from penstock.node.clock import Clock

LIFE_MS: Final = 60_000
OPEN_MAX: Final = 10_000
OPEN_PER_CALLER_MAX: Final = 100


class Deed(NamedTuple):
    method: str
    subject: str  # the topic's name, or the key's id
    topic: int = 0  # the topic's id

    def __str__(self) -> str:
        return f"{self.method} of {self.subject}"


class _OpenToken(NamedTuple):
    caller: str
    deed: Deed
    expires_ms: int


class Confirmations:
    """Tokens that were given out: each is good for one call of one caller, for a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, _OpenToken] = {}  # oldest first, which is the order of their ends

    def give(self, caller: str, deed: Deed) -> tuple[str, int]:
        now_ms = self._clock.now_ms()
        self._make_room(caller, now_ms)
        token, expires_ms = secrets.token_urlsafe(12), now_ms + LIFE_MS
        self._open[token] = _OpenToken(caller, deed, expires_ms)
        return token, expires_ms

    def use(self, caller: str, token: str, deed: Deed, *, force: bool) -> None:
        """Raise unless `force` is said and `token` was given to this caller for exactly this."""
        if not force:
            raise FailedPrecondition(f"{deed.method} needs force=true", field="force")
        found = self._open.get(token)
        if found is not None and found.caller == caller:
            del self._open[token]
            if found.deed == deed and found.expires_ms > self._clock.now_ms():
                return
        raise FailedPrecondition(
            f"{deed} needs a confirmation token that this caller was given for it", field="confirm"
        )

    def _make_room(self, caller: str, now_ms: int) -> None:
        while self._open and next(iter(self._open.values())).expires_ms <= now_ms:
            del self._open[next(iter(self._open))]
        callers = [each.caller for each in self._open.values()]
        if callers.count(caller) >= OPEN_PER_CALLER_MAX:
            self._drop_oldest(caller)
        elif len(callers) >= OPEN_MAX:
            self._drop_oldest(Counter(callers).most_common(1)[0][0])

    def _drop_oldest(self, caller: str) -> None:
        del self._open[next(token for token, of in self._open.items() if of.caller == caller)]
