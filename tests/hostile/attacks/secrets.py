"""Secrets that open more than they should: the cluster's key, and others' confirmation tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from tests.hostile.attacks.rebinding import status_of
from tests.hostile.site import CLOSED, HOST, JOBS, OPEN, Site
from tests.hostile.stage import Stage, attack

from penstock.client.network.connection import Connection
from penstock.errors import PenstockError, Unavailable
from penstock.model.batch import SCHEMAS, Kind
from penstock.server._generated import penstock_pb2 as pb
from penstock.server._generated import penstock_pb2_grpc
from penstock.testing.process import ServerProcess
from penstock.wire.frame import FrameType
from penstock.wire.messages import (
    Enqueue,
    Extend,
    Forwarded,
    Part,
    Return,
    Settle,
    TokenPart,
    pack,
)

WEAK_KEYS = ("x", "secret", "a" * 15)
REFUSED_S_MAX = 15.0
CONFIRMS = 10_500
CONFIRMS_AT_ONCE = 100
TOPIC = "doomed"


@attack(OPEN, short=OPEN)
async def weak_cluster_keys(stage: Stage) -> None:
    """a node that is told a guessable cluster.key does not start, and names it"""
    for i, key in enumerate(WEAK_KEYS):
        stage.tally.tried += 1
        server = ServerProcess(
            data=stage.site.folder / f"weak-{i}",
            options={"cluster.key": key},
            arguments=["--cluster", "etcd://127.0.0.1:1", "--node-id", "n1"],
        )
        try:
            async with asyncio.timeout(REFUSED_S_MAX):
                await server.start()
        except Unavailable as error:
            stage.tally.refused += 1
            stage.expect("cluster.key" in str(error), f"cluster.key {key!r} is refused unnamed")
        except TimeoutError:
            stage.expect(False, f"a node starts with the cluster.key {key!r}")
        finally:
            await server.kill()


@attack(CLOSED, short=CLOSED)
async def cluster_key_as_api_key(stage: Stage) -> None:
    """the nodes' own secret as an API key over HTTP and gRPC"""
    site = stage.site
    for head in (f"X-API-Key: {site.cluster_key}", f"Authorization: Bearer {site.cluster_key}"):
        stage.tally.tried += 1
        whole = f"GET /v1/heaps HTTP/1.1\r\nHost: {site.authority}\r\n{head}\r\n\r\n"
        found = await status_of(site, whole.encode())
        stage.tally.refused += found == 401
        stage.expect(found == 401, f"cluster.key as an API key got {found} over HTTP")
    stage.tally.tried += 1
    code = await _grpc_code(site, site.cluster_key)
    stage.tally.refused += code is grpc.StatusCode.UNAUTHENTICATED
    stage.expect(
        code is grpc.StatusCode.UNAUTHENTICATED, f"cluster.key as an API key got {code} over gRPC"
    )


async def _grpc_code(site: Site, key: str) -> grpc.StatusCode:
    assert site.ca is not None
    credentials = grpc.ssl_channel_credentials(site.ca.read_bytes())
    address = f"{HOST}:{site.ports['grpc']}"
    async with grpc.aio.secure_channel(address, credentials) as channel:
        stub = penstock_pb2_grpc.PenstockStub(channel)  # type: ignore[no-untyped-call]
        try:
            await stub.ListHeaps(pb.ListHeapsRequest(), metadata=(("x-api-key", key),), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@attack(CLOSED, short=CLOSED)
async def forwarded(stage: Stage) -> None:
    """requests that claim to come from another node, with an ordinary key"""
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"forwarded"]})
    token = bytes(8)
    topic = (await stage.site.call("topic_get", topic=JOBS))["id"]
    parts = [TokenPart(0, 1, 1, topic)]
    requests: dict[str, tuple[FrameType, Any, bytes]] = {
        "enqueue": (FrameType.BATCH, Enqueue(JOBS, [Part(0, 1, len(body))], forwarded=True), body),
        "settle": (FrameType.ACK, Settle(JOBS, parts, forwarded=True), token),
        "return": (FrameType.NACK, Return(JOBS, parts, forwarded=True), token),
        "extend": (FrameType.HEARTBEAT, Extend(JOBS, parts, 1000, forwarded=True), token),
    }
    connection = await stage.site.connect(stage.site.mallory)
    try:
        for name, (type, control, data) in requests.items():
            stage.tally.tried += 1
            try:
                async with asyncio.timeout(10):
                    await connection.ask(type, Forwarded, pack(control), data)
            except PenstockError as error:
                stage.tally.refused += 1
                stage.expect(
                    error.code == "unauthenticated",
                    f"a forwarded {name} is refused as {error.code}",
                )
            else:
                stage.expect(False, f"an ordinary key may forward: {name}")
    finally:
        await connection.close()


@attack(CLOSED, short=CLOSED)
async def confirmations(stage: Stage) -> None:
    """confirmation tokens of another key, and so many of them that none is left"""
    site = stage.site
    await site.call("topic_create", config={"name": TOPIC})
    mallory, other = await site.connect(site.mallory), await site.connect(site.keys["other"])
    try:
        given = await other.call("confirm", method="topic_delete", subject=TOPIC)
        stage.expect(
            not await _deletes(stage, mallory, given["confirm"]),
            "a token of another key deletes a topic",
        )
        await _exhaust(stage, mallory)
        try:
            given = await other.call("confirm", method="topic_delete", subject=TOPIC)
        except PenstockError as error:
            stage.expect(False, f"no token is left for others: {error.code}")
        else:
            stage.expect(
                await _deletes(stage, other, given["confirm"]), "a token of one's own is refused"
            )
    finally:
        await mallory.close()
        await other.close()


async def _deletes(stage: Stage, connection: Connection, token: str) -> bool:
    stage.tally.tried += 1
    try:
        await connection.call("topic_delete", topic=TOPIC, force=True, confirm=token)
    except PenstockError:
        stage.tally.refused += 1
        return False
    return True


async def _exhaust(stage: Stage, connection: Connection) -> None:
    for _ in range(0, CONFIRMS, CONFIRMS_AT_ONCE):
        found = await asyncio.gather(
            *(
                connection.call("confirm", method="topic_delete", subject=TOPIC)
                for _ in range(CONFIRMS_AT_ONCE)
            ),
            return_exceptions=True,
        )
        stage.tally.note("tokens", sum(not isinstance(one, BaseException) for one in found))
