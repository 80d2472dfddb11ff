"""Messages and errors in JSON."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw

from penstock.errors import InvalidArgument
from penstock.server import requests as ask
from penstock.server.coalesce import Entry
from penstock.server.entries import Entries, packed_headers, producer_run

_raw: Final = msgspec.json.Decoder(Raw)


def payload_of(message: ask.NewMessage, *, place: str = "") -> bytes:
    """The bytes to store; `place` is where the message stands in the request."""
    text = message.payload_base64
    if isinstance(message.payload, Raw):
        if text is not UNSET:
            raise InvalidArgument(
                "give payload or payload_base64, not both", field=f"{place}payload_base64"
            )
        payload = bytes(message.payload)
        # The decoder checked the syntax of what it did not decode, but not the text in its strings.
        if not payload.isascii() and not _is_utf8(payload):
            raise InvalidArgument("payload is not UTF-8", field=f"{place}payload")
        return payload
    if not isinstance(text, str):
        raise InvalidArgument("a message needs a payload", field=f"{place}payload")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        name = f"{place}payload_base64"
        raise InvalidArgument(f"{name} is not base64: {error}", field=name) from error


def entry_of(request: ask.Enqueue) -> Entry:
    return Entry(
        payload_of(request),
        request.priority,
        request.key.encode(),
        packed_headers(request.headers),
        request.delay_ms,
        -1 if request.max_retries is None else request.max_retries,
        producer_run(request.producer_id, epoch=request.epoch, seq=request.seq, count=1),
    )


def entries_of(request: ask.EnqueueBatch) -> Entries:
    messages = request.messages
    run = producer_run(
        request.producer_id, epoch=request.epoch, seq=request.seq, count=len(messages)
    )
    return Entries(
        [payload_of(m, place=f"messages[{i}].") for i, m in enumerate(messages)],
        [m.priority for m in messages],
        [m.key.encode() for m in messages],
        [packed_headers(m.headers) for m in messages],
        [m.delay_ms for m in messages],
        [-1 if m.max_retries is None else m.max_retries for m in messages],
        () if run is None else (run,),
    )


def message_json(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the engine in the form of `responses.Message` and its kin."""
    shown = dict(message)
    payload, key = bytes(shown.pop("payload", b"")), bytes(shown.pop("key", b""))
    if _is_json(payload):
        shown["payload"] = Raw(payload)
    else:
        shown["payload_base64"] = base64.b64encode(payload).decode()
    if key and _is_utf8(key):
        shown["key"] = key.decode()
    elif key:
        shown["key_base64"] = base64.b64encode(key).decode()
    shown["headers"] = text_headers(shown.get("headers"))
    return shown


def text_headers(headers: dict[Any, Any] | None) -> dict[str, str]:
    """Headers as text; a native client may have written bytes or numbers."""
    return {_text(name): _text(value) for name, value in (headers or {}).items()}


def _text(value: Any) -> str:
    return (
        bytes(value).decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    )


def _is_json(payload: bytes) -> bool:
    if not payload.isascii() and not _is_utf8(payload):
        return False
    try:
        _raw.decode(payload)
    except msgspec.DecodeError:
        return False
    return True


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
