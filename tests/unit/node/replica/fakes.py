"""Stand-ins for what lies around the network side of replication."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec

from penstock.cluster.membership import NodeInfo
from penstock.errors import Unavailable
from penstock.model.batch import Batch
from penstock.node.replica.ports import Key, SeedHead
from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import Append, Follow, Letter
from penstock.wire.frame import FrameType
from penstock.wire.messages import OpenFollow, Told


def info(node: str, *, port: int = 1, uuid: str = "") -> NodeInfo:
    return NodeInfo(id=node, uuid=uuid or f"uuid-{node}", host="127.0.0.1", native_port=port)


class Handle:
    """A follow stream that was opened."""

    def __init__(self, control: OpenFollow, follower: Any) -> None:
        self.key, self.follower = (control.topic, control.partition), follower
        self.follow = msgspec.msgpack.decode(control.follow, type=Follow)
        self.closed = False


class FakeConnection:
    """A connection to `node`, to be lost by `drop`."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.alive = True
        self.frames: list[list[Told]] = []
        self.handles: list[Handle] = []
        self._closed = asyncio.Event()

    def tell(self, told: list[Told]) -> None:
        self.frames.append(told)

    def open(self, control: OpenFollow, stream: Any) -> int:
        self.handles.append(Handle(control, stream))
        return len(self.handles)

    def close_stream(self, number: int) -> None:
        self.handles[number - 1].closed = True

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def abort(self) -> None:
        self.drop()

    def drop(self) -> None:
        if self.alive:
            self.alive = False
            self._closed.set()
            for handle in self.handles:
                if not handle.closed:
                    handle.follower.on_end(Unavailable("lost"))


class Dialling:
    """Connects to the nodes that are `up`; a node that is not refuses."""

    def __init__(self, *up: str) -> None:
        self.up = set(up)
        self.connections: list[FakeConnection] = []
        self.attempts = 0
        self._news = asyncio.Event()

    async def __call__(self, to: NodeInfo) -> Any:
        self.attempts += 1
        self._news.set()
        if to.id not in self.up:
            raise Unavailable("nobody listens", refused=True)
        self.connections.append(FakeConnection(to.id))
        return self.connections[-1]

    async def until(self, count: int) -> FakeConnection:
        """The connection with this number, once it is made."""
        async with asyncio.timeout(60):
            while len(self.connections) < count:
                self._news.clear()
                await self._news.wait()
        await asyncio.sleep(0)
        return self.connections[count - 1]


class Spawning:
    """Tasks that end with the test."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def __call__(self, work: Coroutine[Any, Any, None], *, name: str = "") -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work, name=name))

    async def done(self) -> None:
        """Until all that was spawned has ended."""
        while pending := [task for task in self.tasks if not task.done()]:
            await asyncio.gather(*pending)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class FakeHost:
    """Writes down what it is told."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.told: list[tuple[Any, ...]] = []
        self.replica = SimpleNamespace(promised=0)
        self.head = SeedHead(1, 0, 0, 0)
        self.batches: list[Batch] = []

    def on_record(self, record: PartitionRecord, revision: int) -> None:
        self.told.append(("record", record.epoch, revision))

    def on_epoch_taken(self, record: PartitionRecord, revision: int) -> None:
        self.told.append(("taken", record.epoch, revision))

    def on_change_lost(self) -> None:
        self.told.append(("change lost",))

    def on_members(self, alive: Mapping[str, int]) -> None:
        self.told.append(("members", dict(alive)))

    def on_message(self, message: Letter) -> None:
        self.told.append(("message", message))

    def on_follow(self, follow: Follow) -> None:
        self.told.append(("follow", follow.node, follow.stream))

    def on_slice(self, append: Append, batches: list[Batch]) -> None:
        self.told.append(("slice", append.committed, len(batches)))

    def on_stream_lost(self, stream: int, *, gone: bool = False) -> None:
        self.told.append(("lost", stream, gone))

    def on_follower_lost(self, node: str, stream: int) -> None:
        self.told.append(("follower lost", node, stream))

    def on_writable(self, node: str) -> None:
        self.told.append(("writable", node))

    def on_tick(self) -> None:
        return

    async def resign(self) -> None:
        self.told.append(("resign",))

    async def seed_head(self) -> SeedHead:
        return self.head

    async def seed_slice(self, from_sequence: int, *, through: int, bytes_max: int) -> list[Batch]:
        found = [b for b in self.batches if from_sequence <= b.last and b.first <= through]
        return found[:2]


class FakeOutput:
    """A session's end of a stream."""

    def __init__(self) -> None:
        self.blocked = False
        self.frames: list[tuple[FrameType, int, bytes]] = []

    def send(self, type: FrameType, number: int, *payload: Any, flags: int = 0) -> None:
        self.frames.append((type, number, b"".join(bytes(part) for part in payload)))
