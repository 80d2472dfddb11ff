"""Confirmation tokens: a destructive call is made in two steps, the first of which is harmless.

A token belongs to the caller that asked for it, and is for one call on one topic or key. A topic
that is deleted and made again under its name is another topic: tokens of the old one are void.
Nobody can use up what others need: a caller that asks for too many loses its own oldest ones, and
where all together are too many, the one that has most of them does.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
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
    deed: Deed
    expires_ms: int


_Tokens = OrderedDict[str, _OpenToken]  # oldest first, which is also the order in which they expire


class Confirmations:
    """Tokens that were given out: each is good for one call of one caller, for a minute.

    Invariant: `_count` tokens are in `_open`, whose callers have one each at least."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, _Tokens] = {}
        self._count = 0

    def give(self, caller: str, deed: Deed) -> tuple[str, int]:
        """A token for `caller`, and until when it is good."""
        now_ms = self._clock.now_ms()
        self._expire(caller, now_ms)
        if len(self._open.get(caller, ())) >= OPEN_PER_CALLER_MAX:
            self._drop_oldest(caller)
        if self._count >= OPEN_MAX:
            self._make_room(now_ms)
        token = secrets.token_urlsafe(12)
        self._open.setdefault(caller, OrderedDict())[token] = _OpenToken(deed, now_ms + LIFE_MS)
        self._count += 1
        return token, now_ms + LIFE_MS

    def use(self, caller: str, token: str, deed: Deed, *, force: bool) -> None:
        """Raise unless `force` is said and `token` was given to this caller for exactly this."""
        if not force:
            raise FailedPrecondition(f"{deed.method} needs force=true", field="force")
        found = self._take(caller, token)
        if (
            found is None
            or found.expires_ms <= self._clock.now_ms()
            or not hmac.compare_digest("\0".join(map(str, found.deed)), "\0".join(map(str, deed)))
        ):
            raise FailedPrecondition(
                f"{deed} needs a confirmation token that this caller was given for it",
                field="confirm",
            )

    def _take(self, caller: str, token: str) -> _OpenToken | None:
        found = self._open.get(caller, OrderedDict()).pop(token, None)
        if found is not None:
            self._shrunk(caller)
        return found

    def _make_room(self, now_ms: int) -> None:
        for caller in list(self._open):
            self._expire(caller, now_ms)
        if self._count >= OPEN_MAX:
            self._drop_oldest(max(self._open, key=lambda caller: len(self._open[caller])))

    def _expire(self, caller: str, now_ms: int) -> None:
        while caller in self._open and next(iter(self._open[caller].values())).expires_ms <= now_ms:
            self._drop_oldest(caller)

    def _drop_oldest(self, caller: str) -> None:
        self._open[caller].popitem(last=False)
        self._shrunk(caller)

    def _shrunk(self, caller: str) -> None:
        self._count -= 1
        if not self._open[caller]:
            del self._open[caller]
