"""From a refused document to `InvalidArgument` with the field's name."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from penstock.errors import InvalidArgument

T = TypeVar("T")
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_NAMED: Final = re.compile(r"(?:required|unknown) field `(.*?)`")
_BOUND: Final = re.compile(r"(?:<=|length <=) (-?\d+)")


def invalid(error: msgspec.DecodeError) -> InvalidArgument:
    """The same complaint, with the path of the field, such as `messages[3].priority`."""
    text = str(error)
    path = _PATH.search(text)
    named = _NAMED.search(text)
    bound = _BOUND.search(text)
    places = [path.group(1) if path else "", named.group(1) if named else ""]
    return InvalidArgument(
        _PATH.sub("", text),
        field=".".join(place for place in places if place) or "body",
        limit=int(bound.group(1)) if bound else None,
    )


def request_of(fields: dict[str, Any], type: type[T], *, text: bool = False) -> T:
    """`fields` as arguments of a call. `text`: the values come from a query string."""
    try:
        return msgspec.convert(fields, type, strict=not text)
    except msgspec.ValidationError as error:
        raise invalid(error) from error
