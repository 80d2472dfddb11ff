"""Confirmation tokens: a destructive call is made in two steps, the first of which is harmless."""

from __future__ import annotations

import hmac
import secrets
from typing import Final, NamedTuple

from penstock.errors import FailedPrecondition, LimitExceeded
from penstock.node.clock import Clock

LIFE_MS: Final = 60_000
OPEN_MAX: Final = 10_000
NEED_CONFIRMATION: Final = ("topic_delete", "purge", "dlq_delete", "key_revoke")


class _Open(NamedTuple):
    method: str
    subject: str
    expires_ms: int


class Confirmations:
    """Tokens that were given out: each is good for one call on one subject, for a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}

    def give(self, method: str, subject: str) -> tuple[str, int]:
        now_ms = self._clock.now_ms()
        self._open = {t: o for t, o in self._open.items() if o.expires_ms > now_ms}
        if len(self._open) >= OPEN_MAX:
            raise LimitExceeded(f"{OPEN_MAX} confirmations are open", limit=OPEN_MAX)
        token = secrets.token_urlsafe(12)
        self._open[token] = _Open(method, subject, now_ms + LIFE_MS)
        return token, now_ms + LIFE_MS

    def use(self, token: str, method: str, subject: str, *, force: bool) -> None:
        """Raise unless `force` is said and `token` was given for exactly this."""
        if not force:
            raise FailedPrecondition(f"{method} needs force=true", field="force")
        found = self._open.pop(token, None)
        if (
            found is None
            or found.expires_ms <= self._clock.now_ms()
            or not hmac.compare_digest(found.method + "\0" + found.subject, f"{method}\0{subject}")
        ):
            raise FailedPrecondition(
                f"{method} of {subject} needs a confirmation token made for it", field="confirm"
            )
