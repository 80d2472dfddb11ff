"""What the process's exit code says; `docs/cli.md` is the reader's copy of this table."""

from __future__ import annotations

from enum import IntEnum

from penstock.errors import (
    CallerError,
    Fatal,
    NotFound,
    PenstockError,
    RetryableError,
    Unauthenticated,
    WorldMoved,
)


class Exit(IntEnum):
    OK = 0
    FAILED = 1  # a check did not hold, or stored data is damaged
    USAGE = 2  # the command line is wrong
    NOT_FOUND = 3  # no such topic, message or key
    CALLER = 4  # the request is wrong, or was not confirmed
    UNAVAILABLE = 5  # try again later: no node, no space, a bound is reached
    UNAUTHENTICATED = 6  # no API key, an unknown one, or a revoked one
    CONFLICT = 7  # the world moved on: a lease was lost, a sequence is taken
    INTERNAL = 70  # a bug in this command
    INTERRUPTED = 130  # Ctrl-C


# The first class that matches decides, so the specific ones stand first.
_BY_ERROR: tuple[tuple[type[PenstockError], Exit], ...] = (
    (NotFound, Exit.NOT_FOUND),
    (Unauthenticated, Exit.UNAUTHENTICATED),
    (CallerError, Exit.CALLER),
    (RetryableError, Exit.UNAVAILABLE),
    (WorldMoved, Exit.CONFLICT),
    (Fatal, Exit.FAILED),
)


def exit_of(error: PenstockError) -> Exit:
    """The exit code that tells a script what kind of error this was."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), Exit.INTERNAL)
