"""The way of one request through the code, found by tracing a real one.

    python scripts/walk.py [put|pop|delta|takeover] [--json]

A put, a pop with its acknowledgement, and a delta on its way to a subscriber are traced in a node
inside this process, once everything is warm; a takeover in the node that takes over, one of three
real processes. Each function is listed where it is entered, with its room and the time since the
beginning; a coroutine that goes on after a wait is not listed again. Last comes how many modules
and calls it took. Comprehensions are part of the function that they stand in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import penstock

if TYPE_CHECKING:
    from penstock.testing.cluster import ClusterProcesses

ROOT: Final = Path(penstock.__file__).parent
PART_OF_ANOTHER: Final = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
WARM: Final = 5  # times that something is done before it is traced
FILE: Final = "WALK_FILE"  # where a node that is traced writes its steps
WRITTEN_S_MAX: Final = 60.0  # after the second signal


class Step(NamedTuple):
    """A function that was entered."""

    us: int
    depth: int
    file: str  # within the package
    line: int
    name: str

    @property
    def room(self) -> str:
        return str(Path(self.file).parent)


class Walk:
    """Every function of the package that this thread enters between `start` and `stop`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._frames: dict[int, FrameType] = {}  # kept alive, so that no id is used again
        self.began_ns = 0

    def start(self) -> None:
        self.began_ns = time.perf_counter_ns()
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        sys.setprofile(None)
        self._frames.clear()

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in PART_OF_ANOTHER or id(frame) in self._frames:
            return
        if code.co_filename.startswith(str(ROOT)):
            self._frames[id(frame)] = frame
            us = (time.perf_counter_ns() - self.began_ns) // 1000
            file = code.co_filename.removeprefix(f"{ROOT}/")
            step = Step(us, _depth(frame), file, code.co_firstlineno, code.co_qualname)
            self.steps.append(step)


def _depth(frame: FrameType) -> int:
    """How many functions of the package are around this one."""
    depth = 0
    while (outer := frame.f_back) is not None:
        depth += outer.f_code.co_filename.startswith(str(ROOT))
        frame = outer
    return depth


# --- within this process ---


@asynccontextmanager
async def client() -> AsyncIterator[penstock.Client]:
    with tempfile.TemporaryDirectory(prefix="penstock-walk-") as folder:
        async with penstock.connect(folder) as made:
            yield made


async def walk_put() -> list[Step]:
    async with client() as made:
        topic = await made.topic("walk", of=bytes)
        for _ in range(WARM):
            await topic.put(b"x", key="k")
        walk = Walk()
        walk.start()
        await topic.put(b"x", key="k")
        walk.stop()
        return walk.steps


async def walk_pop() -> list[Step]:
    async with client() as made:
        topic = await made.topic("walk", of=bytes)
        await topic.put_many([b"x"] * (WARM + 1))
        for _ in range(WARM):
            for message in await topic.pop():
                await message.ack()
        walk = Walk()
        walk.start()
        for message in await topic.pop():
            await message.ack()
        walk.stop()
        return walk.steps


async def walk_delta() -> list[Step]:
    """From the SDK's `replace` until the subscriber has the delta."""
    async with client() as made:
        vectors = made.deltas("walk", dimensions=4, create=True, origin="walk")
        await vectors.create("v", [0.0] * 4)
        released = aiter(vectors.subscribe(from_sequence="now"))
        walk = Walk()
        coming = asyncio.ensure_future(anext(released))
        for number in range(WARM):
            await asyncio.sleep(0.05)
            await vectors.replace("v", [float(number)] * 4)
            await coming
            coming = asyncio.ensure_future(anext(released))
        await asyncio.sleep(0.05)
        walk.start()
        await vectors.replace("v", [9.0] * 4)
        await coming
        walk.stop()
        return walk.steps


# --- in a process of its own ---


async def walk_takeover() -> list[Step]:
    """From the moment at which its coordinator is killed until a put is acknowledged again."""
    from penstock.testing.cluster import ClusterProcesses

    with tempfile.TemporaryDirectory(prefix="penstock-walk-") as folder:
        site = _site(Path(folder) / "site")
        cluster = ClusterProcesses(Path(folder))
        for name, node in cluster.nodes.items():
            node.environment |= {"PYTHONPATH": site, FILE: str(_file(folder, name))}
        try:
            await cluster.start_all()
            taker = await _lose_coordinator(cluster)
            return await asyncio.to_thread(_steps, _file(folder, taker))
        finally:
            await cluster.close()


async def _lose_coordinator(cluster: ClusterProcesses) -> str:
    """Kill it, put, and have the others trace meanwhile; the node that has taken over."""
    async with penstock.connect(cluster.url) as made:
        topic = await made.topic("walk", of=bytes, partitions=1, replication_factor=3)
        await topic.put(b"x")
        [coordinator] = await cluster.coordinators("walk")
        survivors = [cluster.nodes[node].pid for node in cluster.running if node != coordinator]
        for pid in survivors:
            os.kill(pid, signal.SIGUSR1)
        await cluster.kill(coordinator)
        await topic.put(b"y")
        for pid in survivors:
            os.kill(pid, signal.SIGUSR1)
    await cluster.wait_ready()
    [taker] = await cluster.coordinators("walk")
    return taker


def _site(folder: Path) -> str:
    """A folder that makes every Python that has it in its path listen to the signal."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import runpy\nrunpy.run_path({str(Path(__file__).resolve())!r})['on_signal']()\n"
    )
    return str(folder)


def _file(folder: str, node: str) -> Path:
    return Path(folder) / f"{node}.steps"


def _steps(file: Path) -> list[Step]:
    deadline = time.monotonic() + WRITTEN_S_MAX
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no node has written {file}")
        time.sleep(0.05)
    return [Step(*step) for step in json.loads(file.read_text())]


def on_signal() -> None:
    """In a node's process: the first SIGUSR1 begins to trace, the second writes what was found."""
    walk = Walk()

    def turn(_: int, __: object) -> None:
        if not walk.began_ns:
            walk.start()
            return
        walk.stop()
        part = Path(f"{os.environ[FILE]}.part")
        part.write_text(json.dumps(walk.steps))
        part.rename(os.environ[FILE])

    signal.signal(signal.SIGUSR1, turn)


# --- showing ---

WAYS: Final = {
    "put": walk_put, "pop": walk_pop, "delta": walk_delta, "takeover": walk_takeover,
}  # fmt: skip


def counted(steps: list[Step]) -> dict[str, int]:
    return {"modules": len({step.file for step in steps}), "calls": len(steps)}


def show(steps: list[Step]) -> None:
    width = max(len(step.room) for step in steps)
    shallowest = min(step.depth for step in steps)
    for step in steps:
        place = f"{Path(step.file).name}:{step.line}"
        indent = "  " * (step.depth - shallowest)
        print(f"{step.us:>9} µs  {step.room:<{width}}  {indent}{step.name}  ({place})")
    found = counted(steps)
    print(f"{found['modules']} modules, {found['calls']} calls")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("way", nargs="?", choices=WAYS, default="put")
    parser.add_argument("--json", action="store_true", help="print the steps and counts as JSON")
    given: Any = parser.parse_args(arguments)
    steps = asyncio.run(WAYS[given.way]())
    if given.json:
        print(json.dumps({**counted(steps), "steps": [step._asdict() for step in steps]}))
    else:
        show(steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
