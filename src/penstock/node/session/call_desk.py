"""The administrative calls of one connection: how many are under way, and how large answers are.

A call that is answered with messages may be large, and its caller may not read: it begins when the
answers before it are read, when there is room for its own in the budget, and a few at a time: an
answer that is being made takes several times its size.
"""

from __future__ import annotations

import asyncio
from typing import Final

from penstock.errors import LimitExceeded, PenstockError
from penstock.node.calls import (  # noqa: F401 - they register their methods
    cluster,
    live,
    log,
    messages,
    status,
)
from penstock.node.calls.table import Caller, dispatch_call
from penstock.node.door.budget import READ_BYTES, Held
from penstock.node.door.flow import Flow
from penstock.node.engine import Engine
from penstock.node.write.requests import Reply
from penstock.wire.calls import traits_of
from penstock.wire.messages import Call

CALLS_MAX: Final = 256  # administrative calls under way on one connection
READS_MAX: Final = 4  # of them, that are answered with messages: together they may be large
SHARED_CALLS_MAX: Final = 16_384  # the same of a gateway's connection, which bounds its callers


class CallDesk:
    """`shared`: the connection is a gateway's, for many callers, which it counts itself."""

    def __init__(self, engine: Engine, flow: Flow, *, shared: bool) -> None:
        self._engine, self._flow = engine, flow
        self._under_way = 0
        self._most = SHARED_CALLS_MAX if shared else CALLS_MAX
        self._reads = asyncio.Semaphore(READS_MAX)

    def check_room(self) -> None:
        if self._under_way >= self._most:
            raise LimitExceeded(f"{self._most} calls are under way", limit=self._most)

    def begin(self, call: Call, caller: Caller, reply: Reply) -> None:
        self._under_way += 1
        self._engine.spawn(self._answer(call, caller, reply), name=f"call-{call.method}")

    async def _answer(self, call: Call, caller: Caller, reply: Reply) -> None:
        try:
            if traits_of(call.method).large:
                async with self._reads:
                    await self._flow.room()
                    reply(await self._read(call, caller))
            else:
                await self._flow.room()
                reply(await dispatch_call(self._engine, caller, call.method, call.arguments))
        except PenstockError as error:
            reply(error)
        except Exception:
            reply(PenstockError("internal error"))
            raise
        finally:
            self._under_way -= 1

    async def _read(self, call: Call, caller: Caller) -> dict[str, object]:
        """The answer of a call that may be large; there is room for it before it is made."""
        account = self._flow.account
        await account.acquire(READ_BYTES, Held.READS)
        try:
            async with self._engine.reads:
                return await dispatch_call(self._engine, caller, call.method, call.arguments)
        finally:
            account.give_back(READ_BYTES, Held.READS)
