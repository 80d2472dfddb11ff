"""Spans and W3C trace context, when the application uses OpenTelemetry.

Nothing is imported here that the application has not imported by itself: without its tracer there
is nobody to send spans to, and then a message costs one dictionary lookup.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

_API: Final = "opentelemetry.trace"


class TraceSpan:
    """A span that is the current one until it ends."""

    def __init__(self, span: Any, token: Any = None) -> None:
        self.span, self._token = span, token

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self.span.record_exception(error)
            self.span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self.span.end()
        if self._token is not None:
            from opentelemetry import context

            context.detach(self._token)


def active() -> bool:
    return _API in sys.modules


def begin_put(topic: str, headers: Mapping[str, Any] | None) -> tuple[TraceSpan, dict[str, Any]]:
    """A producer span, and `headers` with its context. Only when `active()`."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    span = trace.get_tracer("penstock").start_span(
        f"put {topic}",
        kind=trace.SpanKind.PRODUCER,
        attributes={
            "messaging.system": "penstock",
            "messaging.destination.name": topic,
            "messaging.batch.message_count": 1,
        },
    )
    carrier: dict[str, Any] = {}
    context = trace.set_span_in_context(span)
    TraceContextTextMapPropagator().inject(carrier, context)
    return TraceSpan(span), {**carrier, **(headers or {})}


def begin_process(
    topic: str, *, headers: Mapping[str, Any], attributes: dict[str, Any]
) -> TraceSpan:
    """A consumer span, child of the one that put the message with these headers, and the current
    one until it ends. Only when `active()`."""
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    texts = {name: value for name, value in headers.items() if isinstance(value, str)}
    span = trace.get_tracer("penstock").start_span(
        f"process {topic}",
        context=TraceContextTextMapPropagator().extract(texts),
        kind=trace.SpanKind.CONSUMER,
        attributes={
            "messaging.system": "penstock",
            "messaging.destination.name": topic,
            **attributes,
        },
    )
    return TraceSpan(span, context.attach(trace.set_span_in_context(span)))
