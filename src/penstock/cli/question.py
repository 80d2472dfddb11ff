"""What a search is asked, as people type it: a vector, and conditions on metadata."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import msgspec

from penstock.errors import InvalidArgument

SIGNS: Final = {"=": "$eq", "!=": "$ne", "<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte"}
COMPARISON: Final = re.compile("<=|>=|!=|=|<|>")


def parsed(text: str) -> list[float]:
    """Numbers as a JSON list, or with commas or spaces between them."""
    if text == "-":
        text = sys.stdin.read()
    text = text.strip()
    try:
        if text.startswith("["):
            return msgspec.json.decode(text, type=list[float])
        return [float(number) for number in text.replace(",", " ").split()]
    except (ValueError, msgspec.DecodeError) as error:
        raise InvalidArgument(f"not a vector: {error}", field="vector") from error


def condition(texts: list[str] | None) -> dict[str, Any] | None:
    """What all of `--where` say together; each is a comparison, or a JSON object."""
    found = [_condition(text) for text in texts or ()]
    return {"$and": found} if len(found) > 1 else found[0] if found else None


def _condition(text: str) -> dict[str, Any]:
    if text.startswith("{"):
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"not a JSON object: {error}", field="where") from error
    sign = COMPARISON.search(text)
    name = text[: sign.start()].strip() if sign else ""
    if not sign or not name:
        raise InvalidArgument(f"not a comparison such as lang=de: {text!r}", field="where")
    return {name: {SIGNS[sign[0]]: _value(text[sign.end() :].strip())}}


def _value(text: str) -> Any:
    """A value as JSON writes it; anything else is text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError):
        return text
