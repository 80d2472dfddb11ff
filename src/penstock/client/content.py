"""What a topic's messages are in Python: bytes, text, or anything JSON can carry.

The type given as `of` decides: `bytes` and `str` pass as they are, a pydantic model through its own
JSON, and everything else (dict, list, msgspec.Struct, dataclass, TypedDict, …) through msgspec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from penstock.errors import InvalidArgument

T = TypeVar("T")


class Content(NamedTuple, Generic[T]):
    """`encode` and `decode` raise `InvalidArgument` on a value or payload of another kind."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


def content_of(of: Any) -> Content[Any]:
    """How values of type `of` become payloads, and back."""
    if of is bytes:
        return Content(_bytes, _same)
    if of is str:
        return Content(_text, _untext)
    if hasattr(of, "model_validate_json") and hasattr(of, "model_dump_json"):
        return _pydantic(of)
    return _json(of)


def _bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise InvalidArgument(
        f"this topic takes bytes, not {type(value).__name__}; say of={type(value).__name__}"
        " when you open it",
        field="value",
    )


def _same(payload: bytes) -> bytes:
    return payload


def _text(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    raise InvalidArgument(f"this topic takes str, not {type(value).__name__}", field="value")


def _untext(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"a payload is not UTF-8: {error}", field="payload") from error


def _json(of: Any) -> Content[Any]:
    try:
        decoder = msgspec.json.Decoder(of)
    except TypeError as error:
        raise InvalidArgument(f"{of!r} cannot be a topic's type: {error}", field="of") from error
    encoder = msgspec.json.Encoder()

    def encode(value: Any) -> bytes:
        try:
            return encoder.encode(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"a value is not JSON: {error}", field="value") from error

    def decode(payload: bytes) -> Any:
        try:
            return decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"a payload is not {of}: {error}", field="payload") from error

    return Content(encode, decode)


def _pydantic(of: Any) -> Content[Any]:
    def encode(value: Any) -> bytes:
        if not isinstance(value, of):
            raise InvalidArgument(
                f"this topic takes {of.__name__}, not {type(value).__name__}", field="value"
            )
        text: str = value.model_dump_json()
        return text.encode()

    def decode(payload: bytes) -> Any:
        try:
            return of.model_validate_json(payload)
        except ValueError as error:  # pydantic's ValidationError is one
            raise InvalidArgument(
                f"a payload is not {of.__name__}: {error}", field="payload"
            ) from error

    return Content(encode, decode)
