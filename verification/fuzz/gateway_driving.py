"""Cases against a node's gateway: each is one HTTP request, one gRPC call, or frames of one.

Whatever is sent, the answer is never a failure of the gateway's own, the node's log has no
traceback, and who means well is served as before.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any, Final

import grpc
from google.protobuf.message_factory import GetMessageClass

from penstock.server.grpc.listener import SERVICE
from verification.fuzz.corpus import QUEUE
from verification.fuzz.driving import CASE_S_MAX, Driver, Target
from verification.fuzz.gateway_corpus import changed, grpc_request, http_request

LISTEN_S: Final = 0.3  # for an answer that has no end, or that nobody owes
OWN_FAILURES: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
STREAMS: Final = frozenset({"PopStream", "Subscribe"})
DESTRUCTIVE: Final = frozenset({"DeleteHeap", "RevokeKey", "MakeHeap", "CreateKey"})
METHODS: Final = [m for m in SERVICE.methods if m.name not in STREAMS | DESTRUCTIVE]


class GatewayDriver(Driver):
    """Runs cases against the HTTP and gRPC ports of a target's servers."""

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target, seed)
        self._channels: dict[int, grpc.aio.Channel] = {}

    async def case(self, number: int) -> None:
        dice = random.Random(f"{self.findings.seed}/{number}")
        server = self._target.servers[number % len(self._target.servers)]
        play = dice.choice((self._http, self._call, self._frames))
        try:
            async with asyncio.timeout(CASE_S_MAX):
                problem = await play(dice, server.ports)
        except TimeoutError:
            problem = f"there was no answer in {CASE_S_MAX:.0f} s"
        except OSError:
            self.findings.refused += 1
            problem = None if server.running else f"the node is gone: {server.last_words()}"
        if problem:
            self._problem(f"case {number}: {problem}")
        self.findings.cases += 1
        self.findings.frames += 1

    async def _http(self, dice: random.Random, ports: dict[str, int]) -> str | None:
        request = http_request(dice)
        answer = await _sent(request, ports["http"])
        self.findings.answers += len(answer)
        found = re.match(rb"HTTP/1\.1 (\d+)", answer)
        if found and int(found[1]) >= 500:
            return f"{request!r} was answered by {answer!r}"
        return None

    async def _frames(self, dice: random.Random, ports: dict[str, int]) -> str | None:
        method = dice.choice(METHODS)
        path = f"/{SERVICE.full_name}/{method.name}"
        answer = await _sent(grpc_request(dice, path, message(method)), ports["grpc"])
        self.findings.answers += len(answer)
        return None

    async def _call(self, dice: random.Random, ports: dict[str, int]) -> str | None:
        """A call by the library, whose message may be of no type at all."""
        method = dice.choice(METHODS)
        sent = changed(dice, message(method))
        call = self._channel(ports["grpc"]).unary_unary(f"/{SERVICE.full_name}/{method.name}")
        try:
            self.findings.answers += len(await call(sent, timeout=CASE_S_MAX))
        except grpc.aio.AioRpcError as error:
            if error.code().name in OWN_FAILURES:
                return f"{method.name} of {sent!r} was answered by {error!r}"
        return None

    def _channel(self, port: int) -> Any:
        if port not in self._channels:
            self._channels[port] = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return self._channels[port]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)


def message(method: Any) -> bytes:
    """A request of a method, with what all of them have."""
    made: Any = GetMessageClass(method.input_type)()
    for field in made.DESCRIPTOR.fields:
        if field.name == "topic":
            made.topic = QUEUE
        elif field.type == field.TYPE_STRING and not field.is_repeated:
            setattr(made, field.name, "x")
    return bytes(made.SerializeToString())


async def _sent(data: bytes, port: int) -> bytes:
    """What comes back for it, in a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(LISTEN_S):
            while part := await reader.read(1 << 16):
                received += part
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return received
