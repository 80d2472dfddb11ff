"""Spans and W3C trace context, when the application uses OpenTelemetry.

Nothing is imported here that the application has not imported by itself: without its tracer there
is nobody to send spans to, and then a message costs one dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

API: Final = "opentelemetry.trace"  # Whoever traces has imported it.


@contextmanager
def putting(topic: str) -> Iterator[dict[str, str]]:
    """A producer span, and the headers that carry its context."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    with trace.get_tracer("penstock").start_as_current_span(
        f"put {topic}",
        kind=trace.SpanKind.PRODUCER,
        attributes={
            "messaging.system": "penstock",
            "messaging.destination.name": topic,
            "messaging.batch.message_count": 1,
        },
    ):
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        yield carrier


def processing(
    topic: str, *, headers: Mapping[str, Any], attributes: dict[str, Any]
) -> AbstractContextManager[Any]:
    """A consumer span, child of the one that put the message with these headers."""
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    texts = {name: value for name, value in headers.items() if isinstance(value, str)}
    return trace.get_tracer("penstock").start_as_current_span(
        f"process {topic}",
        context=TraceContextTextMapPropagator().extract(texts),
        kind=trace.SpanKind.CONSUMER,
        attributes={
            "messaging.system": "penstock",
            "messaging.destination.name": topic,
            **attributes,
        },
    )
