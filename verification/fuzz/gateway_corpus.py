"""Requests to the gateway, HTTP and gRPC, with something changed in most of them."""

from __future__ import annotations

import json
import random
from typing import Any, Final
from urllib.parse import quote

from verification.fuzz.corpus import DELTAS, QUEUE

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ID: Final = "01M7GJXPV1000G008000000002"
TOKEN: Final = "1.0.1.99"
# Method, path and arguments of calls that a healthy caller may make.
REQUESTS: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("GET", "/v1/heaps", {}), ("GET", f"/v1/heaps/{QUEUE}", {}), ("GET", "/v1/stats", {}),
    ("POST", "/v1/heaps", {"topic": QUEUE, "exists_ok": True, "partitions": 2}),
    ("PATCH", f"/v1/heaps/{QUEUE}", {"k": 100}),
    ("POST", "/v1/enqueue", {"topic": QUEUE, "payload": {"a": [1]}, "headers": {"h": "v"}}),
    ("POST", "/v1/enqueue:batch", {"topic": QUEUE, "messages": [{"payload": 1, "key": "k"}]}),
    ("POST", "/v1/pop", {"topic": QUEUE, "limit": 3}), ("GET", "/v1/peek", {"topic": QUEUE}),
    ("POST", "/v1/ack", {"topic": QUEUE, "lease_token": TOKEN}),
    ("POST", "/v1/nack:batch", {"topic": QUEUE, "lease_tokens": [TOKEN], "delay_ms": 5}),
    ("POST", "/v1/extend", {"topic": QUEUE, "lease_token": TOKEN, "extend_ms": 10}),
    ("POST", "/v1/move-to-dlq", {"topic": QUEUE, "message_id": ID, "reason": "why"}),
    ("GET", "/v1/dlq", {"topic": QUEUE, "limit": 5}),
    ("POST", "/v1/dlq:replay", {"topic": QUEUE, "message_ids": [ID]}),
    ("POST", "/v1/confirm", {"method": "purge", "topic": QUEUE}),
    ("POST", "/v1/purge", {"topic": QUEUE, "force": True, "confirm": "x"}),
    ("GET", "/v1/status", {}), ("GET", "/metrics", {}), ("GET", "/readyz", {}),
    ("GET", f"/v1/deltas/{DELTAS}/events", {"namespace": "n", "from_sequence": 1}),
)  # fmt: skip
NASTY: Final = (
    b"\xff", b"\xed\xa0\x80", b"\x00", b"%ff", b"\r\n", b'"', b"\\ud800", b"[" * 3000, b"9" * 400,
    b"1e999", b"-1", b"null", b"\xf0\x9f\x90\x98", b"\xc0\xaf", b"{}", b"true", b" ",
)  # fmt: skip


def changed(dice: random.Random, data: bytes) -> bytes:
    """Bytes with something flipped, cut, doubled or put in."""
    for _ in range(dice.choice((0, 1, 1, 2, 5))):
        at, end = sorted(dice.randrange(len(data) + 1) for _ in range(2))
        data = dice.choice(
            (
                data[:at] + dice.choice(NASTY) + data[at:],
                data[:at] + dice.choice(NASTY) + data[end:],
                data[:at] + dice.randbytes(min(8, end - at)) + data[end:],
                data[:at] + data[end:],
                data[:end] + data[at:],
            )
        )
    return data


def http_request(dice: random.Random) -> bytes:
    """One request, whole or not."""
    method, path, arguments = dice.choice(REQUESTS)
    body = b""
    if method in ("POST", "PATCH"):
        body = changed(dice, json.dumps(arguments).encode())
    elif arguments:
        query = "&".join(f"{name}={quote(str(value))}" for name, value in arguments.items())
        path = f"{path}?{query}"
    target = changed(dice, path.encode()) if dice.random() < 0.3 else path.encode()
    head = [method.encode() + b" " + target + b" HTTP/1.1", b"host: localhost"]
    head.append(b"content-length: %d" % len(body))
    names = (b"x-api-key", b"x-request-id", b"last-event-id", b"origin", b"host", b"expect")
    odd = [name for name in names if dice.random() < 0.05]
    head += [name + b": " + dice.choice((b"100-continue", *NASTY)) for name in odd]
    whole = b"\r\n".join([*head, b"connection: close", b"", b""]) + body
    return changed(dice, whole) if dice.random() < 0.15 else whole


def frame(type: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    head = len(payload).to_bytes(3, "big") + bytes((type, flags))
    return head + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header that is neither indexed nor packed."""
    found = b"\x00"
    for text in (name, value):
        size, length = len(text), bytes((len(text),)) if len(text) < 127 else b"\x7f"
        if size >= 127:
            size -= 127
            while size >= 128:
                length += bytes((size & 127 | 128,))
                size >>= 7
            length += bytes((size,))
        found += length + text
    return found


def grpc_headers(path: str, **metadata: str) -> bytes:
    fixed = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "x",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    named = {name.replace("_", "-"): value for name, value in metadata.items()}
    return b"".join(literal(n.encode(), v.encode()) for n, v in (fixed | named).items())


def grpc_request(dice: random.Random, path: str, message: bytes) -> bytes:
    """A connection's worth of frames: a call with its message, some of it changed."""
    body = b"\x00" + len(message).to_bytes(4, "big") + message
    metadata = {"x_api_key": "\u00ff"} if dice.random() < 0.1 else {}
    frames = [
        frame(4, 0, 0), frame(1, 0x4, 1, changed_sometimes(dice, grpc_headers(path, **metadata))),
        frame(0, 0x1, 1, changed_sometimes(dice, body)),
    ]  # fmt: skip
    if dice.random() < 0.2:
        frames.insert(
            dice.randrange(4), frame(dice.randrange(12), dice.randrange(256), 1, b"12345")
        )
    whole = PREFACE + b"".join(frames)
    return changed(dice, whole) if dice.random() < 0.2 else whole


def changed_sometimes(dice: random.Random, data: bytes) -> bytes:
    return changed(dice, data) if dice.random() < 0.4 else data
