"""`name=value` on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from penstock.errors import InvalidArgument


def pairs_of(texts: Iterable[str] | None, *, option: str) -> dict[str, str]:
    """The given pairs as a map; raises `InvalidArgument` that names the option."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise InvalidArgument(f"--{option} needs name=value, not {text!r}", field=option)
        found[name] = value
    return found


def values_of(texts: Iterable[str] | None, *, option: str) -> dict[str, Any]:
    """As `pairs_of`, with each value as JSON reads it (numbers, true, false), else as text."""
    return {name: _value(text) for name, text in pairs_of(texts, option=option).items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
