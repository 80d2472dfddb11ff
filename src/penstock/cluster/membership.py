"""Which nodes are alive, and for how long each has been.

    nodes/<node id>  a `NodeInfo`, JSON, under the node's lease

A node keeps its lease alive; when it stops to, because it ended or is cut off, its entry vanishes
and the others hear of it. Being listed gives no rights: it decides who is asked, never who is
believed. A node that was taken for dead and is not finds its entry gone and registers again.

The revision that created an entry is the node's age: the lowest is the oldest, by no clock. A
node that registers again, or restarts, is new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec

from penstock.cluster.store import LeasingStore, repeat, until_won
from penstock.errors import AlreadyExists, FailedPrecondition

NODES: Final = "nodes/"
RETRY_S: Final = 0.5  # the pause between attempts while the store is of no use
POLL_S: Final = 0.1  # the pause between looks at an entry that has to expire
_TROUBLE: Final = "membership is not in step with the metadata store"
log: Final = logging.getLogger(__name__)


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    uuid: str  # that of its data folder; another folder is another node, whatever its id
    host: str
    native_port: int
    zone: str = ""  # nodes of one zone fail together; a node without one fails alone
    version: str = ""
    draining: bool = False  # gets no more partitions, and gives away those it has
    started_ms: int = 0


_decoder: Final = msgspec.json.Decoder(NodeInfo)


class Membership:
    """`join`, then `run` in a task until it is cancelled; `leave` before or after that. While the
    store is away or refuses us, `alive` stays what it was; if this node's lease runs out meanwhile,
    it registers again."""

    def __init__(
        self,
        store: LeasingStore,
        *,
        lease_ttl_s: int,
        before_return: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        """`before_return` raises if this node must not register again. `on_change` is called
        whenever `alive` or `ages` has changed."""
        self.alive: dict[str, NodeInfo] = {}
        self.ages: dict[str, int] = {}
        self._store = store
        self._ttl_s = lease_ttl_s
        self._before_return, self._on_change = before_return, on_change
        self._info: NodeInfo | None = None
        self._lease = 0
        self._left = asyncio.Event()
        self._missing = asyncio.Event()  # our entry was seen to be gone
        self._registering = asyncio.Lock()  # nobody registers again while we leave
        self._reading = asyncio.Lock()  # an older answer must not replace a newer one

    @property
    def joined(self) -> bool:
        return self._info is not None

    async def join(self, info: NodeInfo) -> None:
        """Register, in the place of an entry that an earlier run of this node left, and read who
        else is there. Another node's with our id is given the time to expire; `AlreadyExists` if it
        does not."""
        deadline = asyncio.get_running_loop().time() + 2 * self._ttl_s
        while True:
            try:
                async with self._registering:
                    await self._register(info)
                break
            except AlreadyExists:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(POLL_S)
        await self._read()

    async def set_draining(self, draining: bool) -> None:
        """Tell the others whether this node is to be given replicas; its age stays."""
        if self._info is None:
            raise FailedPrecondition("only a node that has joined can tell others about itself")
        async with self._registering:
            self._info = info = msgspec.structs.replace(self._info, draining=draining)
            entry = await self._store.get(NODES + info.id)
            if entry is not None:  # else `run` registers, with the new info
                await self._store.put(
                    entry.key,
                    msgspec.json.encode(info),
                    expected_revision=entry.revision,
                    lease=self._lease,
                )
        await self._read()

    async def run(self) -> None:
        if self._info is None:
            raise FailedPrecondition("join before running")
        async with asyncio.TaskGroup() as tasks:
            for name, work in (("stay", self._stay), ("follow", self._follow)):
                repeating = repeat(work, trouble=_TROUBLE, pause_s=RETRY_S)
                tasks.create_task(repeating, name=f"members-{name}")

    async def leave(self) -> None:
        """Tell the others at once that we go; without it they wait for the lease to end."""
        async with self._registering:
            self._left.set()
            await self._store.revoke(self._lease)

    async def _stay(self) -> None:
        assert self._info is not None
        if self._left.is_set():
            await asyncio.Event().wait()
        registered = await self._store.keep_alive(self._lease)
        if registered and self._missing.is_set():  # perhaps seen just before it was made
            self._missing.clear()
            registered = await self._store.get(NODES + self._info.id) is not None
        if not registered:
            await self._register_again(self._info.id)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._ttl_s / 3):
                await self._missing.wait()

    async def _register_again(self, node: str) -> None:
        async with self._registering:
            if self._left.is_set() or self._info is None:
                return
            await self._before_return()
            log.warning("node %s was taken for dead; it registers again", node)
            await self._register(self._info)
        await self._read()

    async def _follow(self) -> None:
        async with self._store.watch(NODES) as changes:
            await self._read()
            async for _ in changes:
                await self._read()

    async def _register(self, info: NodeInfo) -> None:
        async def swap() -> None:
            entry = await self._store.get(NODES + info.id)
            if entry is not None:
                other = _decoder.decode(entry.value)
                if other.uuid != info.uuid:
                    raise AlreadyExists(
                        f"another node is registered as {info.id}, at {other.host}", node=info.id
                    )
                # An entry that is only overwritten would keep the age of the earlier run.
                await self._store.delete(entry.key, expected_revision=entry.revision)
            lease = await self._store.grant(self._ttl_s)
            key, value = NODES + info.id, msgspec.json.encode(info)
            await self._store.put(key, value, expected_revision=0, lease=lease)
            self._info, self._lease = info, lease

        await until_won(swap)

    async def _read(self) -> None:
        """Take over who is alive. All of it each time: nodes are few, and it cannot go wrong."""
        async with self._reading:
            entries = await self._store.range(NODES)
            alive = {
                entry.key.removeprefix(NODES): _decoder.decode(entry.value) for entry in entries
            }
            ages = {entry.key.removeprefix(NODES): entry.revision_created for entry in entries}
            changed = (alive, ages) != (self.alive, self.ages)
            self.alive, self.ages = alive, ages
        if self._info is not None and self._info.id not in alive and not self._left.is_set():
            self._missing.set()
        if changed:
            self._on_change()
