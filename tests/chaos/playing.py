"""One run from the beginning to the verdict."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.chaos import judging
from tests.chaos.arena import KEY, NODES, Arena, arena
from tests.chaos.consuming import Popper, Streamer, Tail
from tests.chaos.faults import Faults
from tests.chaos.history import History
from tests.chaos.producing import JOBS, LEDGER, Appender, Producer
from tests.chaos.schedule import Planned, plan

import penstock
from penstock.model.topic import TopicConfig

PARTITIONS: Final = {JOBS: 6, LEDGER: 2}
TOPIC: Final[dict[str, Any]] = {
    "replication_factor": 3, "retention_ms": 30 * 24 * 3600 * 1000, "max_retries": 1000,
    "backoff_ms_base": 100, "backoff_ms_cap": 1000,
}  # fmt: skip
SETTLE_S_MAX: Final = 240.0
AFTER_S: Final = 5.0  # of load when everything is healed
LOAD_S_MAX: Final = 180.0  # until the last request is answered or given up
SAY_S: Final = 10.0


class Run:
    """The parts of a run, and what they have in common."""

    def __init__(
        self, folder: Path, arena: Arena, *, planned: int, seed: int, say: Callable[[str], None]
    ) -> None:
        self._folder, self._arena, self._seed, self._say = folder, arena, seed, say
        self._planned = planned  # faults
        self.history = History(folder)
        self._urls = [f"penstock://{endpoint}" for endpoint in arena.endpoints()]
        self._stop_load, self._stop_faults = asyncio.Event(), asyncio.Event()
        self.faults = Faults(arena, self.history, self._stop_faults)
        self.done: Counter[str] = Counter()
        self._not_done: list[str] = []
        self.progress: dict[str, Any] = {}

    async def make_topics(self) -> None:
        async with penstock.connect(self._urls, api_key=KEY) as client:
            for name, partitions in PARTITIONS.items():
                await client.topic(name, bytes, partitions=partitions, **TOPIC)

    # --- the load ---

    def _workers(self, rate: float) -> list[Any]:
        """Coroutines; `rate` makes all of them quicker or slower."""
        history, stop = self.history, self._stop_load
        common = (self._urls, history)

        def seed(name: str) -> str:
            return f"{name} {self._seed}"

        workers: list[Any] = [
            Producer(name, *common, seed(name)).run(stop, pause_s=0.1 / rate)
            for name in ("p1", "p2", "p3", "p4")
        ]
        workers += [
            Appender(name, *common, seed(name)).run(
                stop, pause_s=0.3 / rate, partitions=PARTITIONS[LEDGER]
            )
            for name in ("a1", "a2")
        ]
        workers += [
            Popper(name, *common, seed(name)).run(stop, pause_s=0.1 / rate)
            for name in ("c1", "c2", "c3")
        ]
        workers += [Streamer(name, *common, seed(name)).run(stop) for name in ("s1", "s2")]
        workers += [
            Tail(f"t{p}", *common, seed(f"t{p}"), partition=p).run(stop)
            for p in range(PARTITIONS[JOBS])
        ]
        return workers

    # --- the faults ---

    async def _one(self, planned: Planned, began: float) -> None:
        await asyncio.sleep(began + planned.at_s - time.monotonic())
        if self._stop_faults.is_set():
            return
        at = time.monotonic()
        try:
            done = await self.faults.run(planned.kind, random.Random(planned.seed))
        except Exception as error:
            self.faults.complaints.append(f"{planned.kind} at {planned.at_s}: {error!r}")
            raise
        took = time.monotonic() - at
        what = planned.kind if done == planned.kind else f"{planned.kind} > {done or 'failed'}"
        self._say(f"{at - began:6.1f} s  {what:16} {took:.1f} s")
        if done:
            self.done[done] += 1
        if done != planned.kind:
            self._not_done.append(planned.kind)

    async def _all(self, schedule: Sequence[Planned], seconds: float) -> None:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for planned in schedule:
                tasks.create_task(self._one(planned, began))
        await asyncio.sleep(began + seconds - time.monotonic())

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(SAY_S)
            self.history.flush()
            count = self.history.outcomes
            ok = {k: count[f"{k} ok"] for k in ("put", "batch", "atomic", "append", "pop", "ack")}
            self._say(f"          {ok}, faults {sum(self.done.values())}")

    async def play(self, schedule: Sequence[Planned], *, seconds: float, rate: float) -> None:
        """Load and faults; then everything is healed, and the load goes on for a moment."""
        async with asyncio.TaskGroup() as tasks:
            keeping = [
                tasks.create_task(self._arena.look_after()),
                tasks.create_task(self._tell()),
            ]
            load = [tasks.create_task(worker) for worker in self._workers(rate)]
            await self._all(schedule, seconds)
            await self._heal()
            await asyncio.sleep(AFTER_S)
            self._stop_load.set()
            _, late = await asyncio.wait(load, timeout=LOAD_S_MAX)
            self.progress["workers_late"] = len(late)
            for task in (*late, *keeping):
                task.cancel()

    async def _heal(self) -> None:
        began = time.monotonic()
        self._stop_faults.set()
        await self._arena.heal()
        healed = await judging.settle(self._arena, within_s=SETTLE_S_MAX, say=self._say)
        emptied = await self.faults.empty_spare()
        self.progress |= {
            "healed": healed and emptied,
            "healed_s": round(time.monotonic() - began, 1),
        }
        self._say(f"          healed: {self.progress}")

    # --- the verdict ---

    async def judge(self) -> dict[str, Any]:
        arena, history = self._arena, self.history
        self.progress["drained"] = await judging.drain_all(arena, history, self._urls)
        ends = await judging.committed(arena)
        logs = await judging.read_logs(arena, ends)
        configs = {
            topic: msgspec.convert(
                await arena.call(NODES[0], "topic_get", topic=topic), TopicConfig
            )
            for topic in judging.TOPICS
        }
        history.close()
        for node in NODES:
            await arena.stop(node)
        on_disk = {
            node: await asyncio.to_thread(judging.read_disk, arena.disks[node].data, configs, ends)
            for node in NODES
        }
        found = await asyncio.to_thread(judging.Judge(history).judge, logs, on_disk)
        damage = [f"{node}: {disk.damage}" for node, disk in on_disk.items() if disk.damage]
        for node in arena.nodes:
            for mistake, count in judging.mistakes(self._folder / f"{node}.log").items():
                found["exceptions"] += count
                found["problems"].append(f"{node} wrote {count} times: {mistake}")
        return self.document(found, damage)

    def document(self, found: dict[str, Any], damage: list[str]) -> dict[str, Any]:
        operations: dict[str, dict[str, int]] = {}
        for name, count in sorted(self.history.outcomes.items()):
            kind, outcome = name.split()
            if kind != "fault":
                operations.setdefault(kind, {})[outcome] = count
        played = sum(self.done.values())
        problems = [
            *found.pop("problems"), *damage, *self.faults.complaints,
            *(f"ended by itself: {exit}" for exit in self._arena.exits),
        ]  # fmt: skip
        if played < self._planned:
            problems.append(f"{played} of {self._planned} faults were played")
        progress = self.progress | {
            "longest_without_an_acknowledgement_s": round(self.history.silence_us / 1e6, 1)
        }
        going_on = progress["healed"] and not progress["workers_late"]
        return {
            "ok": found.pop("ok") and going_on and not problems,
            "seed": self._seed,
            "faults": played,
            "faults_by_kind": dict(sorted(self.done.items())),
            "faults_not_done": self._not_done,
            "operations": operations,
            **found,
            "damaged_disks": len(damage),
            "unexpected_exits": len(self._arena.exits),
            "progress": progress,
            "problems": problems,
        }


async def play(
    folder: Path,
    *,
    seconds: float,
    faults: int,
    seed: int,
    say: Callable[[str], None],
    kinds: Sequence[str] = (),
    rate: float = 1.0,
) -> dict[str, Any]:
    """Run `faults` faults under load for so long; the verdict. The folder keeps all there is."""
    schedule = plan(seconds=seconds, count=faults, seed=seed, kinds=kinds)
    spare = any(planned.kind == "move" for planned in schedule)
    async with arena(folder, spare=spare) as made:
        run = Run(folder, made, planned=len(schedule), seed=seed, say=say)
        await run.make_topics()
        say(f"three nodes, {len(schedule)} faults in {seconds:.0f} s, seed {seed}: {folder}")
        await run.play(schedule, seconds=seconds, rate=rate)
        return await run.judge()
