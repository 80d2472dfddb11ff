"""What a caller may pass to the SDK, and that a mistake is nobody's but the caller's own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import penstock
import penstock.sync
from penstock.errors import InvalidArgument
from penstock.model.plain import DEPTH_MAX, HEADERS_VALUES_MAX


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


class Urgency(IntEnum):
    HIGH = 7


WRONG: list[tuple[str, Any]] = [
    ("priority", 1.5),
    ("priority", "1"),
    ("priority", None),
    ("priority", True),
    ("priority", 1 << 63),
    ("priority", math.nan),
    ("max_retries", 1.5),
    ("max_retries", "1"),
    ("max_retries", -1),
    ("max_retries", 1001),
    ("max_retries", False),
    ("delay", math.inf),
    ("delay", math.nan),
    ("delay", -1),
    ("delay", "1"),
    ("delay", [1]),
    ("delay", 1e300),
    ("delay", 10**400),
    ("delay", timedelta.max),
    ("delay", timedelta(days=-1)),
    ("key", 5),
    ("key", 5.0),
    ("key", ["a"]),
    ("key", "\ud800"),
    ("key", "k" * 1025),
    ("headers", ["a"]),
    ("headers", "abc"),
    ("headers", []),
    ("headers", 0),
    ("headers", {1: "x"}),
    ("headers", {"a": {1: "x"}}),
    ("headers", {b"a": "x"}),
    ("headers", {"a": nested(980)}),
    ("headers", {"a": nested(DEPTH_MAX)}),
    ("headers", {"a": nested(100_000)}),
    ("headers", {"a": [0] * HEADERS_VALUES_MAX}),
    ("headers", {"a": object()}),
    ("headers", {"a": datetime(2026, 1, 1, tzinfo=UTC)}),
    ("headers", {"a": "\ud800"}),
    ("headers", {"a": 1 << 70}),
    ("headers", {"a": "x" * 20_000}),
]
RIGHT: list[dict[str, Any]] = [
    {"priority": np.int64(5)},
    {"priority": Urgency.HIGH},
    {"priority": -(1 << 63)},
    {"max_retries": 0},
    {"max_retries": np.int32(3)},
    {"max_retries": None},
    {"delay": np.float32(0.0)},
    {"delay": timedelta(0)},
    {"delay": None},
    {"key": memoryview(b"k")},
    {"key": bytearray(b"k")},
    {"key": ""},
    {"headers": {}},
    {"headers": MappingProxyType({"a": "b"})},
    {"headers": {"a": [1, 2.5, None, True, b"x", {"b": nested(DEPTH_MAX - 5)}]}},
]


def described(case: tuple[str, Any]) -> str:
    return case[0]  # some values have no text that could stand here


@pytest.fixture
async def topic(tmp_path: Path) -> AsyncIterator[penstock.Topic[bytes]]:
    async with penstock.connect(tmp_path / "data") as client:
        yield await client.topic("jobs", partitions=2)


@pytest.mark.parametrize("case", WRONG, ids=described)
async def test_a_wrong_argument_is_refused_at_once_and_alone(
    topic: penstock.Topic[bytes], case: tuple[str, Any]
) -> None:
    """Before, a float as priority or max_retries left this put and its neighbours waiting for ever;
    a key of 5 became five zero bytes, max_retries=-1 the topic's default; an infinite delay was an
    OverflowError; and headers that are no map were stored."""
    field, value = case
    before = asyncio.create_task(topic.put(b"before"))
    wrong = asyncio.create_task(topic.put(b"wrong", **{field: value}))
    after = asyncio.create_task(topic.put(b"after"))
    async with asyncio.timeout(30):
        with pytest.raises(InvalidArgument) as refused:
            await wrong
        assert refused.value.field == field
        assert await before and await after
        with pytest.raises(InvalidArgument) as refused:
            await topic.put_many([b"x", penstock.Item(b"wrong", **{field: value})])
        assert refused.value.field == field
    producer = await topic.open_producer()
    assert (producer.inflight_entries, producer.inflight_bytes) == (0, 0)
    assert sorted(m.payload for m in await topic.pop(10)) == [b"after", b"before"]


@pytest.mark.parametrize("arguments", RIGHT, ids=lambda arguments: next(iter(arguments)))
async def test_arguments_of_kindred_types_are_taken(
    topic: penstock.Topic[bytes], arguments: dict[str, Any]
) -> None:
    await topic.put(b"one", **arguments)
    await topic.put_many([penstock.Item(b"two", **arguments)])
    popped = await topic.pop(10)
    assert sorted(m.payload for m in popped) == [b"one", b"two"]
    assert all(m.headers == (arguments.get("headers") or {}) for m in popped)


async def test_a_batch_that_cannot_be_built_fails_its_callers(
    topic: penstock.Topic[bytes],
) -> None:
    """What passes every check and still cannot be encoded. Before, its callers waited for ever."""
    producer = await topic.open_producer()
    waiters = [
        producer.add((b"fine", 0, b"", b"", 0, -1)),
        producer.add((b"not a number", 1.5, b"", b"", 0, -1)),  # type: ignore[arg-type]
        producer.add((b"fine", 0, b"", b"", 0, -1)),
    ]
    async with asyncio.timeout(30):
        found = await asyncio.gather(*waiters, return_exceptions=True)
        assert all(isinstance(error, penstock.PenstockError) for error in found)
        assert (producer.inflight_entries, producer.inflight_bytes) == (0, 0)
        assert await topic.put(b"later")
        await producer.drain()
    assert [m.payload for m in await topic.pop(10)] == [b"later"]


async def test_a_wrong_reason_leaves_the_lease_as_it_is(topic: penstock.Topic[bytes]) -> None:
    """Before, the message counted as settled here, and nobody had been told."""
    await topic.put(b"x")
    (message,) = await topic.pop()
    for settle in (message.nack, message.reject):
        with pytest.raises(InvalidArgument, match="reason"):
            await settle(reason=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="delay"):
        await message.nack(delay=math.inf)
    assert message.held
    await message.ack()


async def test_an_error_that_is_no_unicode_gives_the_message_back(
    topic: penstock.Topic[bytes],
) -> None:
    """Before, the handler's error was replaced by a UnicodeEncodeError."""
    await topic.put(b"x", max_retries=0)
    (message,) = await topic.pop()
    with pytest.raises(FileNotFoundError):
        async with message:
            raise FileNotFoundError("caf\udce9")
    (dead,) = [m async for m in topic.dlq]
    assert dead.detail == "FileNotFoundError: caf\\udce9"


def test_the_sync_twin_refuses_the_same(tmp_path: Path) -> None:
    with penstock.sync.connect(tmp_path / "data") as client:
        topic = client.topic("jobs")
        for field, value in WRONG:
            with pytest.raises(InvalidArgument) as refused:
                topic.put(b"wrong", **{field: value})
            assert refused.value.field == field
        topic.put(b"right")
        assert [m.payload for m in topic.pop(10)] == [b"right"]
