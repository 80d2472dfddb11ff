"""What can go wrong, and how it is made right again.

Every fault is a coroutine: it breaks something, waits, and repairs it before it returns. Faults of
one process take turns; all others may overlap. A node that must end by itself (its disk failed) and
does not is a complaint.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.chaos.arena import ETCD, NODES, SPARE, Arena, NodeProcess, Strace
from tests.chaos.history import History
from tests.chaos.network import HOST

from penstock.errors import PenstockError

ENDS_S_MAX: Final = 60.0  # until a node whose disk failed has ended
STEP_S_MAX: Final = 90.0  # until all replicas are in step
MOVE_S_MAX: Final = 120.0  # until replicas are on the spare node, or off it
SYNCS: Final = "fdatasync,fsync,io_submit"  # the log's syncs are asynchronous ones


class Faults:
    """Each public method is a fault; `dice` decides on whom and for how long."""

    def __init__(self, arena: Arena, history: History, stop: asyncio.Event) -> None:
        self._arena, self._history, self._stop = arena, history, stop
        self.complaints: list[str] = []
        self._wiping = asyncio.Lock()  # never two wiped disks at a time
        self._moving = asyncio.Lock()

    async def run(self, kind: str, dice: random.Random) -> str:
        """One fault, written down; the kind that it was in the end, empty if it failed.

        A disk that must not be wiped now gives way to a kill.
        """
        act: Callable[[random.Random], Awaitable[dict[str, Any] | None]] = getattr(self, kind)
        found: dict[str, Any] | None = None
        with self._history.operation("fault", kind) as operation:
            found = await act(dice)
            operation.details |= {} if found is None else found
            if found is None:
                operation.outcome = "failed"
        if operation.outcome == "failed" and kind != "kill":
            return await self.run("kill", dice)
        return kind if operation.outcome == "ok" else ""

    async def _wait(self, seconds: float) -> None:
        """Let time pass, unless all is to end now."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    # --- processes ---

    async def kill(self, dice: random.Random) -> dict[str, Any]:
        """`kill -9`, mostly of a node that coordinates something."""
        node = dice.choice(NODES)
        if dice.random() < 0.7:
            node = await self._arena.coordinator(dice.randrange(3))
        async with self._arena.nodes[node].lock:
            await self._arena.kill(node)
            await self._wait(dice.uniform(0, 4))
            await self._arena.start(node)
        return {"node": node}

    async def pause(self, dice: random.Random) -> dict[str, Any]:
        """SIGSTOP for a while: it wakes up in another time."""
        node = dice.choice(NODES)
        if dice.random() < 0.5:
            node = await self._arena.coordinator(dice.randrange(3))
        seconds = dice.uniform(1, 6)
        async with self._arena.nodes[node].lock:
            self._arena.pause(node)
            try:
                await self._wait(seconds)
            finally:
                self._arena.resume(node)
        return {"node": node, "seconds": seconds}

    async def rolling_restart(self, dice: random.Random) -> dict[str, Any]:
        """SIGTERM for one node after the other."""
        nodes = dice.sample(NODES, 3)
        for node in nodes:
            async with self._arena.nodes[node].lock:
                code = await self._arena.stop(node)
                if code:
                    self.complaints.append(f"{node} ended with {code} when it was told to stop")
                await self._arena.start(node)
            await self._arena.in_step(5)
            if self._stop.is_set():
                break
        return {"nodes": nodes}

    # --- network ---

    async def cut_one_way(self, dice: random.Random) -> dict[str, Any]:
        source, target = dice.sample(NODES, 2)
        return await self._cut([(source, target)], dice.uniform(2, 8))

    async def cut_two_way(self, dice: random.Random) -> dict[str, Any]:
        source, target = dice.sample(NODES, 2)
        return await self._cut([(source, target), (target, source)], dice.uniform(2, 8))

    async def isolate(self, dice: random.Random) -> dict[str, Any]:
        """One node alone: sometimes clients reach it still, sometimes etcd does."""
        node = dice.choice(NODES)
        others = [other for other in NODES if other != node]
        others += [other for other, share in ((ETCD, 0.7), (HOST, 0.3)) if dice.random() < share]
        ways = [way for other in others for way in ((node, other), (other, node))]
        return await self._cut([way for way in ways if way[1] != HOST], dice.uniform(2, 8))

    async def cut_etcd(self, dice: random.Random) -> dict[str, Any]:
        node = dice.choice(NODES)
        ways = [(node, ETCD), (ETCD, node)]
        return await self._cut(dice.choice((ways, ways[:1], ways[1:])), dice.uniform(2, 8))

    async def _cut(self, ways: list[tuple[str, str]], seconds: float) -> dict[str, Any]:
        for way in ways:
            await asyncio.to_thread(self._arena.net.cut, *way)
        try:
            await self._wait(seconds)
        finally:
            for way in ways:
                await asyncio.to_thread(self._arena.net.mend, *way)
        return {"ways": [f"{source}>{target}" for source, target in ways], "seconds": seconds}

    # --- etcd ---

    async def etcd_kill(self, dice: random.Random) -> dict[str, Any]:
        async with self._arena.etcd_lock:
            await asyncio.to_thread(self._arena.etcd.kill)
            await self._wait(dice.uniform(0, 5))
            await asyncio.to_thread(self._arena.etcd.start)
        return {}

    async def etcd_pause(self, dice: random.Random) -> dict[str, Any]:
        async with self._arena.etcd_lock:
            self._arena.etcd.pause()
            try:
                await self._wait(5)
            finally:
                self._arena.etcd.resume()
        return {}

    # --- disks ---

    async def disk_full(self, dice: random.Random) -> dict[str, Any]:
        node = dice.choice(NODES)
        process, disk = self._arena.nodes[node], self._arena.disks[node]
        async with process.lock:
            await asyncio.to_thread(disk.fill)
            try:
                await self._wait(dice.uniform(2, 8))
            finally:
                await asyncio.to_thread(disk.free)
            return {"node": node, "ended": await self._again(node)}

    async def fsync_fails(self, dice: random.Random) -> dict[str, Any]:
        """The node must say no more, and end."""
        node = dice.choice(NODES)
        process = self._arena.nodes[node]
        async with process.lock:
            if not process.running:
                return {"node": node, "ended": await self._again(node)}
            with _may_end(process):
                async with Strace(process.pid, f"{SYNCS}:error=EIO"):
                    code = await process.ended_within(ENDS_S_MAX)
            return {"node": node, "ended": code, "again": await self._failed(node, code)}

    async def disk_fails(self, dice: random.Random) -> dict[str, Any]:
        """A power cut, for the disk: all that was not synced is gone, and the node must end."""
        node = dice.choice(NODES)
        process, disk = self._arena.nodes[node], self._arena.disks[node]
        async with process.lock:
            with _may_end(process):
                await asyncio.to_thread(disk.fail)
                code = await process.ended_within(ENDS_S_MAX)
            if code is None:
                await self._arena.kill(node)
            await asyncio.to_thread(disk.repair)
            return {"node": node, "ended": code, "again": await self._failed(node, code)}

    async def slow_disk(self, dice: random.Random) -> dict[str, Any]:
        node = dice.choice(NODES)
        process = self._arena.nodes[node]
        delay_us = dice.choice((20_000, 100_000, 400_000))
        async with process.lock:
            if process.running:
                async with Strace(process.pid, f"{SYNCS}:delay_enter={delay_us}"):
                    await self._wait(dice.uniform(2, 6))
        return {"node": node, "delay_ms": delay_us / 1000}

    async def wipe(self, dice: random.Random) -> dict[str, Any] | None:
        """An empty disk where there was a replica; never before the last one was copied anew."""
        node = dice.choice(NODES)
        async with self._wiping, self._moving:
            if not await self._arena.in_step(STEP_S_MAX):
                return None
            async with self._arena.nodes[node].lock:
                await self._arena.kill(node)
                await asyncio.to_thread(self._arena.disks[node].wipe)
                await self._wait(dice.uniform(0, 2))
                await self._arena.start(node)
            return {"node": node, "copied": await self._arena.in_step(STEP_S_MAX)}

    async def _failed(self, node: str, code: int | None) -> bool:
        if code is None:
            self.complaints.append(f"{node} went on with a disk that fails")
            await self._arena.kill(node)
        return await self._again(node)

    async def _again(self, node: str) -> bool:
        """Start a node that has ended; whether it had."""
        if self._arena.nodes[node].running:
            return False
        await self._arena.start(node)
        return True

    # --- replicas ---

    async def move(self, dice: random.Random) -> dict[str, Any] | None:
        """Start a fourth node, give it its share of the replicas, and take it away again."""
        async with self._moving:
            async with self._arena.nodes[SPARE].lock:
                await self._arena.start(SPARE)
            moved = await self._ask("cluster_rebalance")
            settled = await self._settled()
            drained = await self._ask("cluster_drain", node=SPARE)
            emptied = await self._emptied()
            if not emptied:
                # It stays a member: the next move, or the end, empties it.
                return {"moved": len(moved), "settled": settled, "left": await self._left()}
            async with self._arena.nodes[SPARE].lock:
                await self._arena.stop(SPARE)
            return {"moved": len(moved), "settled": settled, "drained": len(drained)}

    async def _ask(self, method: str, **arguments: Any) -> list[Any]:
        """A call to whichever node answers first."""
        failed: Exception | None = None
        for _ in range(10):
            for node in NODES:
                try:
                    answer = await self._arena.call(node, method, **arguments)
                except (PenstockError, TimeoutError) as error:
                    failed = error
                else:
                    return list(answer["moves"])
            await asyncio.sleep(1)
        assert failed is not None
        raise failed

    async def _settled(self) -> bool:
        return await self._arena.in_step(MOVE_S_MAX)

    async def _emptied(self) -> bool:
        """Until the spare node holds nothing; asked again, for plans die with their node."""
        for _ in range(int(MOVE_S_MAX)):
            try:
                status = await self._arena.status()
            except (PenstockError, TimeoutError):
                status = None
            if status is not None and not _holds(status, SPARE):
                return True
            await asyncio.sleep(1)
            if _ % 10 == 9:
                await self._ask("cluster_drain", node=SPARE)
        return False

    async def _left(self) -> list[dict[str, Any]]:
        """What the spare node still holds."""
        try:
            status = await self._arena.status()
        except (PenstockError, TimeoutError) as error:
            return [{"unknown": str(error)}]
        return [part for part in status["partitions"] if _holds({"partitions": [part]}, SPARE)]

    async def empty_spare(self) -> bool:
        """At the end: no replica is left on the fourth node, and it is stopped."""
        if SPARE not in self._arena.nodes or not self._arena.nodes[SPARE].running:
            return True
        await self._ask("cluster_drain", node=SPARE)
        emptied = await self._emptied()
        if emptied:
            await self._arena.stop(SPARE)
        else:
            self.complaints.append(f"{SPARE} was not emptied: {await self._left()}")
        return emptied


@contextmanager
def _may_end(process: NodeProcess) -> Iterator[None]:
    process.wanted = False
    try:
        yield
    finally:
        process.wanted = process.running


def _holds(status: dict[str, Any], node: str) -> bool:
    def members(part: dict[str, Any]) -> Iterable[str]:
        return (*part["voters"], *part["joint"], *part["learners"], *part["target"])

    return any(node in members(part) for part in status["partitions"])
