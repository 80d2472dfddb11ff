import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.client.client import Client
from penstock.errors import InvalidArgument


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


async def test_a_message_carries_its_trace_from_put_to_process(
    client: Client, spans: InMemorySpanExporter
) -> None:
    topic = await client.topic("t")
    await topic.put(b"x")
    async with topic.consume() as messages, await anext(messages) as message:
        inside = trace.get_current_span().get_span_context().trace_id
        assert message.headers["traceparent"].split("-")[1] == f"{inside:032x}"
    put, process = spans.get_finished_spans()
    assert (put.name, process.name) == ("put t", "process t")
    assert process.parent is not None and put.context is not None
    assert process.parent.span_id == put.context.span_id


async def test_a_callers_own_traceparent_is_kept(client: Client, broker: Any, spans: Any) -> None:
    topic = await client.topic("t")
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await asyncio.gather(topic.put(b"x", headers={"traceparent": own}), topic.put_many([b"y"]))
    headers = sorted(fields["headers"] for *_, fields in broker.ready)
    assert any(own.encode() in one for one in headers)
    assert all(b"traceparent" in one for one in headers)


async def test_an_error_marks_the_span(client: Client, spans: InMemorySpanExporter) -> None:
    topic = await client.topic("t")
    await topic.put(b"x")
    async with topic.consume() as messages:
        message = await anext(messages)
        with pytest.raises(KeyError):
            async with message:
                raise KeyError("k")
    assert not spans.get_finished_spans()[-1].status.is_ok


async def test_wrong_headers_are_refused_while_tracing_too(client: Client, spans: Any) -> None:
    """Before, they were a TypeError out of the tracer."""
    topic = await client.topic("t")
    for headers in (["a"], "abc", [], 0):
        with pytest.raises(InvalidArgument, match="headers"):
            await topic.put(b"x", headers=headers)  # type: ignore[arg-type]


async def test_a_traceparent_that_is_no_text_is_passed_over(client: Client, spans: Any) -> None:
    """Before, whoever consumed the message got a TypeError."""
    topic = await client.topic("t")
    await topic.put(b"x", headers={"traceparent": 5, "tracestate": [1]})
    async with topic.consume() as messages, await anext(messages) as message:
        assert message.headers == {"traceparent": 5, "tracestate": [1]}
