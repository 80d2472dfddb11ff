import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.errors import PenstockError, Unavailable
from penstock.server._generated import penstock_pb2 as pb
from penstock.server.grpc.messages import PopStream
from penstock.server.pool import GatewayLink

OPEN = pb.PopStreamRequest(open=pb.PopOpen(topic="jobs", credits=5))


async def requests(*more: pb.PopStreamRequest) -> AsyncIterator[pb.PopStreamRequest]:
    for request in more:
        yield request


async def test_what_was_not_sent_is_given_back_unused(
    link: GatewayLink, node: Any, eventually: Callable[..., Any]
) -> None:
    node.deliver = 3
    sent: list[pb.PopStreamResponse] = []

    async def write(response: pb.PopStreamResponse) -> None:
        if sent:
            await asyncio.Event().wait()  # the caller reads no further
        sent.append(response)

    running = asyncio.ensure_future(PopStream(link, write).run(OPEN, requests()))
    await eventually(lambda: bool(sent))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    (returned,) = node.settlements
    assert not returned.counted and returned.delay_ms == 0
    assert sum(part.count for part in returned.parts) == 2
    assert node.unsubscribed == 1


async def test_a_stream_that_the_node_ends_is_unavailable(
    link: GatewayLink, node: Any, eventually: Callable[..., Any]
) -> None:
    async def write(response: pb.PopStreamResponse) -> None: ...

    running = asyncio.ensure_future(PopStream(link, write).run(OPEN, requests()))
    await eventually(lambda: bool(node.streams))
    node.sessions[0].transport.close()
    with pytest.raises(PenstockError) as ended:
        await running
    assert isinstance(ended.value, Unavailable)
