"""Structured logs: one JSON object per line, to stderr.

Everything goes through the standard `logging` tree, from the code here (`get_logger`) as from
libraries, so a program that embeds a node keeps its own say over logs: nothing is configured
until `configure` is called, which only the server does.

Two things never appear in a line: what users put into messages, and secrets. Fields with a telling
name and all bytes are replaced by their size, and anything that looks like an API key loses its
secret wherever it stands, tracebacks included.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TextIO, cast

import msgspec
import structlog

REDACTED_FIELDS: Final = frozenset(
    {
        *("api_key", "authorization", "confirm", "cookie", "password", "secret"),
        *("body", "headers", "key", "payload", "payloads", "value", "values"),
        *("lease_token", "token", "tokens"),
    }
)
DEPTH_MAX: Final = 6  # of nested values that are looked into; deeper ones are left out
_KEY_TEXT: Final = re.compile(r"pk_([a-z2-7]{1,64})_[^\s\"'\\,;<>()]+")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

request_id: ContextVar[str] = ContextVar("penstock_request_id", default="")

EventDict = MutableMapping[str, Any]


def new_request_id() -> str:
    return secrets.token_hex(8)


@contextmanager
def request(id: str | None = None) -> Iterator[str]:
    """Give what is logged inside the request's id: the caller's, if it is a decent one."""
    chosen = id if id and _REQUEST_ID.fullmatch(id) else new_request_id()
    token = request_id.set(chosen)
    try:
        yield chosen
    finally:
        request_id.reset(token)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that takes fields: `log.info("topic created", topic=name)`."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=_FIRST,
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast(structlog.stdlib.BoundLogger, logger)


def configure(level: str = "info", *, stream: TextIO | None = None) -> None:
    """Send all of this process' logs to `stream` (stderr) as JSON. For a process of our own."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _render,
            ],
        )
    )
    structlog.configure(  # for whoever asks structlog itself for a logger
        processors=_FIRST,
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def redact(logger: Any, method: str, event: EventDict) -> EventDict:
    """A structlog processor that takes users' data and secrets out."""
    return {name: _redacted(name, value, DEPTH_MAX) for name, value in event.items()}


def _redacted(name: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        # `value` and `key` also name harmless numbers
        return value
    if name.lower() in REDACTED_FIELDS or isinstance(value, bytes | bytearray | memoryview):
        size = f" {len(value)} bytes" if hasattr(value, "__len__") else ""
        return f"[redacted{size}]"
    if isinstance(value, dict | list | tuple) and depth == 0:
        return "[nested too deep]"
    if isinstance(value, dict):
        return {str(key): _redacted(str(key), item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple) and name != "exc_info":
        return [_redacted("", item, depth - 1) for item in value]
    return value


def _add_request_id(logger: Any, method: str, event: EventDict) -> EventDict:
    if current := request_id.get():
        event.setdefault("request_id", current)
    return event


def _render(logger: Any, method: str, event: EventDict) -> str:
    front = {name: event.pop(name, "") for name in ("time", "level", "logger", "event")}
    line = msgspec.json.encode({**front, **event}, enc_hook=repr).decode()
    return _KEY_TEXT.sub(r"pk_\1_[redacted]", line)


_SHARED: Final[list[Any]] = [
    structlog.contextvars.merge_contextvars,
    _add_request_id,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    redact,
]
_FIRST: Final[list[Any]] = [
    structlog.stdlib.filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    *_SHARED,
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
]
