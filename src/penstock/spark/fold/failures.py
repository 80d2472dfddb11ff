"""What ended a query, as the error that was raised where it happened.

An error of a task, or of the source's own process, reaches the driver as text: Spark's exception
quotes the Python traceback. The last of Penstock's errors in it is the cause.
"""

from __future__ import annotations

import re
from typing import Final

from penstock import errors
from penstock.errors import PenstockError

_RAISED: Final = re.compile(r"penstock\.errors\.(\w+): ([^\n]*)")
# Spark gives a Python process ten seconds to start, which a busy machine may outlast.
_LATE: Final = "Python worker failed to connect back"
_NAMED: Final = re.compile(r"^[\w.]*(?:Error|Exception)\b: .*", re.MULTILINE)


def cause_of(error: BaseException) -> PenstockError:
    """The error that ended a query; `Fatal` if Spark gave up for reasons of its own."""
    if isinstance(error, PenstockError):
        return error
    text = str(error)
    for name, message in reversed(_RAISED.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, PenstockError):
            return _made(kind, message)
    if _LATE in text:
        return errors.Unavailable(_LATE)
    named = _NAMED.findall(text)
    return errors.Fatal(named[-1] if named else text.split("\n", 1)[0] or type(error).__name__)


def _made(kind: type[PenstockError], message: str) -> PenstockError:
    if issubclass(kind, errors.InvalidArgument):
        return kind(message, field="unknown")
    return kind(message)
