import asyncio
from typing import Any

import pytest
from tests.unit.node.replica.fakes import FakeHost

from penstock.errors import Backpressure, Corruption, NotFound, Unavailable
from penstock.model.batch import SCHEMAS, Batch, Kind, seal
from penstock.node.cluster import transport
from penstock.node.cluster.transport import CHUNK_BYTES, HELD_MAX, SeedReader, SeedServer
from penstock.node.replica.ports import SeedHead

KEY = (1, 0)


def batch(first: int, size: int = 10) -> Batch:
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [bytes(size)]})
    return seal(
        Kind.ENQ, body, topic=1, partition=0, epoch=1, epoch_previous=1, first=first, count=1,
        time_ms=5, chain_previous=0,
    )  # fmt: skip


class Line:
    """Peers of which one is connected: its calls go straight to the server."""

    def __init__(self, server: SeedServer) -> None:
        self._server = server
        self.calls: list[str] = []

    def live(self, node: str) -> Any:
        return self if node == "b" else None

    async def call(self, method: str, /, **a: Any) -> dict[str, Any]:
        self.calls.append(method)
        await asyncio.sleep(0)  # as over a network, others come in between
        if method == "replica_seed":
            return await self._server.head((a["topic"], a["partition"]))
        if method == "replica_seed_chunk":
            return self._server.chunk(a["piece"], a["offset"])
        return await self._server.slice(
            (a["topic"], a["partition"]), from_sequence=a["from_sequence"], through=a["through"]
        )


class Target:
    def __init__(self) -> None:
        self.head: SeedHead | None = None
        self.batches: list[Batch] = []

    async def begin(self, head: SeedHead) -> None:
        self.head = head

    async def write(self, batches: list[Batch]) -> None:
        self.batches += batches


@pytest.fixture
def host() -> FakeHost:
    host = FakeHost(KEY)
    host.head = SeedHead(5, 77, 3, 9, 7, 88, 3, b"state")
    host.batches = [batch(sequence) for sequence in range(5, 12)]
    return host


def reader(host: FakeHost) -> tuple[SeedReader, Line]:
    line = Line(SeedServer({KEY: host}))
    return SeedReader(line, bytes_per_s=1 << 40), line  # type: ignore[arg-type]


async def test_a_copy_is_the_snapshot_and_the_batches_up_to_its_end(host: FakeHost) -> None:
    target = Target()
    copying, line = reader(host)
    await copying.fetch("b", KEY, target)
    assert target.head == host.head
    assert [b.first for b in target.batches] == [5, 6, 7, 8, 9]
    assert [b.encode() for b in target.batches] == [b.encode() for b in host.batches[:5]]
    assert line.calls.count("replica_seed_slice") == 3


async def test_a_long_snapshot_and_a_long_batch_come_in_chunks(host: FakeHost) -> None:
    host.head = host.head._replace(snapshot=bytes(range(256)) * (3 * CHUNK_BYTES // 256 + 1))
    host.batches[0] = batch(5, size=2 * CHUNK_BYTES)
    target = Target()
    copying, line = reader(host)
    await copying.fetch("b", KEY, target)
    assert target.head == host.head and target.batches[0].encode() == host.batches[0].encode()
    assert line.calls.count("replica_seed_chunk") == 5


async def test_a_log_that_is_whole_and_empty_is_copied_too(host: FakeHost) -> None:
    host.head = SeedHead(1, 0, 0, 0)
    target = Target()
    await reader(host)[0].fetch("b", KEY, target)
    assert target.head == host.head and target.batches == []


async def test_a_copy_needs_a_connection_and_a_replica(host: FakeHost) -> None:
    with pytest.raises(Unavailable):
        await reader(host)[0].fetch("z", KEY, Target())
    with pytest.raises(NotFound):
        await reader(host)[0].fetch("b", (9, 9), Target())


async def test_a_slice_with_a_hole_is_refused(host: FakeHost) -> None:
    del host.batches[0]
    with pytest.raises(Corruption):
        await reader(host)[0].fetch("b", KEY, Target())


async def test_what_is_held_for_others_is_bounded(host: FakeHost) -> None:
    server = SeedServer({KEY: host})
    host.head = host.head._replace(snapshot=bytes(2 * CHUNK_BYTES))
    asked = (server.head(KEY) for _ in range(HELD_MAX + 3))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    pieces = [each["piece"] for each in answers if isinstance(each, dict)]
    assert len(pieces) == HELD_MAX
    assert sum(isinstance(each, Backpressure) for each in answers) == 3
    for piece in pieces:  # none made room for another
        assert len(server.chunk(piece, CHUNK_BYTES)["data"]) == CHUNK_BYTES
    with pytest.raises(NotFound):
        server.chunk(pieces[-1], CHUNK_BYTES)  # it was fetched to its end
    assert (await server.head(KEY))["piece"]


async def test_what_nobody_asks_for_any_more_makes_room(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SeedServer({KEY: host})
    host.head = host.head._replace(snapshot=bytes(2 * CHUNK_BYTES))
    pieces = [(await server.head(KEY))["piece"] for _ in range(HELD_MAX)]
    monkeypatch.setattr(transport, "HELD_S_MAX", 0.0)
    assert (await server.head(KEY))["piece"]
    with pytest.raises(NotFound):
        server.chunk(pieces[0], CHUNK_BYTES)


async def test_a_copy_without_a_long_piece_goes_on_beside_those_that_fill_the_room(
    host: FakeHost,
) -> None:
    server = SeedServer({KEY: host})
    host.head = host.head._replace(snapshot=bytes(2 * CHUNK_BYTES))
    for _ in range(HELD_MAX):
        await server.head(KEY)
    assert (await server.slice(KEY, from_sequence=5, through=9))["data"]


@pytest.mark.parametrize("receivers", [1, 2 * HELD_MAX])
async def test_many_copies_of_one_source_all_come_to_an_end(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, receivers: int
) -> None:
    monkeypatch.setattr(transport, "HELD_RETRY_S", 0.001)
    host.head = host.head._replace(snapshot=bytes(3 * CHUNK_BYTES))
    line = Line(SeedServer({(1, partition): host for partition in range(20)}))
    targets = {(r, p): Target() for r in range(receivers) for p in range(20 if r == 0 else 2)}
    readers = [SeedReader(line, bytes_per_s=1 << 40) for _ in range(receivers)]  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await asyncio.gather(
            *(readers[r].fetch("b", (1, p), target) for (r, p), target in targets.items())
        )
    assert all(target.head == host.head for target in targets.values())
    assert line.calls.count("replica_seed_chunk") == 2 * len(targets)  # nothing was begun twice
