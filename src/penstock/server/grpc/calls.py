"""A gRPC call from its first byte to its end: who makes it, whether there is room, what it says.

The order is deliberate. Every handler is registered as one that takes a stream of bytes, so that
the library calls it as soon as a call's metadata is there: the key is checked, and the call gets
its place among those in progress, before any message is asked for. Until then the library lets a
caller send no more than a small window. A message that does not come ends the call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from penstock.config import Limits
from penstock.errors import (
    STATUS_TABLE,
    Backpressure,
    InvalidArgument,
    LimitExceeded,
    PenstockError,
    Unavailable,
)
from penstock.node.door.budget import SHARE, Party
from penstock.node.observe.logs import get_logger, new_request_id, request_id
from penstock.server import callers
from penstock.server.callers import retry_after_s
from penstock.server.grpc.front import FrontConnection, GrpcFront
from penstock.server.pool import GatewayLink, Pool

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]
Bytes = AsyncIterator[bytes]
log: Final = get_logger(__name__)

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class GrpcCaller(NamedTuple):
    link: GatewayLink
    connection: FrontConnection
    api_key: str | None


class Calls:
    """The calls in progress. Invariant: `_total` is the sum of `_by_party`.

    A party, the connections of one key or a connection without one, may have twice as many calls
    in progress as there are places left. So one alone may have two thirds of them, and however
    many there are, there are places for the next one.
    """

    def __init__(self, pool: Pool, front: GrpcFront, *, limits: Limits) -> None:
        self._pool, self._limits, self._front = pool, limits, front
        self._by_party: dict[Party, int] = {}
        self._total = 0

    def connection(self, context: Context) -> FrontConnection:
        found = self._front.named.get(context.peer())
        if found is None:
            raise Unavailable("the connection is gone")
        return found

    @asynccontextmanager
    async def admitted(self, context: Context) -> AsyncIterator[GrpcCaller]:
        """The caller of a call that has one of the places, and a good key: from now on its
        connection is no stranger's."""
        api_key = identify(context)
        connection = self.connection(context)
        with self._place(connection):
            link = await self._pool.link(api_key)
            self.connection(context).admit(api_key)  # unless it was lost meanwhile
            yield GrpcCaller(link, connection, api_key)

    @contextmanager
    def _place(self, connection: FrontConnection) -> Iterator[None]:
        """One of the places for calls in progress; raises `LimitExceeded` if none is free."""
        party, places = connection.account.party, callers.REQUESTS_MAX
        mine = self._by_party.get(party, 0)
        if mine >= SHARE * (places - self._total):
            raise LimitExceeded("too many calls are in progress", limit=places)
        self._by_party[party] = mine + 1
        self._total += 1
        connection.calls += 1
        try:
            yield
        finally:
            connection.calls -= 1
            self._total -= 1
            self._by_party[party] -= 1
            if not self._by_party[party]:
                del self._by_party[party]

    async def message(self, requests: Bytes, type: type[M], *, connection: FrontConnection) -> M:
        """The next message of a call that has to have one. The front looks after those that are on
        their way; here it is about those that never begin."""
        loop, within_s = asyncio.get_running_loop(), self._limits.frame_s
        looking: asyncio.TimerHandle

        def look() -> None:
            nonlocal looking
            if connection.receiving:
                looking = loop.call_later(within_s, look)
            else:
                limit.reschedule(loop.time())

        looking = loop.call_later(within_s, look)
        try:
            async with asyncio.timeout(None) as limit:
                return parsed(await anext(aiter(requests)), type)
        except StopAsyncIteration:
            raise InvalidArgument("the call has no message", field="message") from None
        except TimeoutError as error:
            raise InvalidArgument(
                f"the call's message did not come within {within_s:g} s", field="message"
            ) from error
        finally:
            looking.cancel()


def parsed(data: bytes, type: type[M]) -> M:
    try:
        return type.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"this is no {type.__name__}: {error}", field="message") from error


async def parsed_all(requests: Bytes, type: type[M]) -> AsyncIterator[M]:
    async for data in requests:
        yield parsed(data, type)


def answered(run: Callable[[Bytes, Context], Awaitable[Any]]) -> Any:
    async def answer(requests: Bytes, context: Context) -> Any:
        try:
            return await run(requests, context)
        except PenstockError as error:
            return await refuse(context, error)
        except Exception:
            log.exception("call failed", path=str(getattr(context, "_method", "")))
            return await refuse(context, Unavailable("the gateway failed; its log says why"))

    return answer


def identify(context: Context) -> str | None:
    """The call's API key. Its request id, or a new one, is set for the task that serves it."""
    api_key, found = None, ""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization":
            scheme, _, key = _text(value).partition(" ")
            if scheme.lower() == "bearer":
                api_key = key.strip() or None
        elif name == "x-api-key":
            api_key = _text(value) or None
        elif name == "x-request-id":
            found = _text(value)
    request_id.set(found if _REQUEST_ID.fullmatch(found) else new_request_id())
    return api_key


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _printable(value: object) -> str:
    """The value in printable ASCII, for metadata holds nothing else."""
    return ascii(str(value))[1:-1]


async def refuse(context: Context, error: PenstockError) -> Any:
    """End the call with the error's status; what else it says goes into the trailing metadata."""
    code, _ = STATUS_TABLE[error.status]
    trailing = [("penstock-code", error.code), ("x-request-id", request_id.get())]
    trailing += [
        (f"penstock-{name.replace('_', '-')}", _printable(value))
        for name, value in error.details.items()
    ]
    if isinstance(error, Backpressure):
        trailing.append(("retry-after", str(retry_after_s(error))))
    await context.abort(_CODES[code], error.message, tuple(trailing))
