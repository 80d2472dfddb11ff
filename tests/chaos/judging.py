"""The end of a run: drain what is left, read every replica's log, and hold the books against it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.chaos.arena import KEY, NODES, Arena
from tests.chaos.consuming import VISIBILITY_S, Popper, read_all
from tests.chaos.history import History
from tests.chaos.producing import JOBS, LEDGER

import penstock
from penstock.errors import PenstockError
from penstock.heap.machine import Heap
from penstock.log.flush import LogOptions
from penstock.log.partition import PartitionLog
from penstock.log.verify import verify_folder
from penstock.model.batch import Batch, Kind
from penstock.model.topic import TopicConfig
from penstock.node.replica.replay import replay
from verification.checkers import VIOLATIONS, Checker, Verdict
from verification.events import AtRest, Committed, Entered, Stuck, log_events
from verification.replay import LogReplay

TOPICS: Final = (JOBS, LEDGER)
QUIET_ROUNDS: Final = int(VISIBILITY_S / 0.5) + 6  # empty pops of half a second, past any lease
DRAIN_S_MAX: Final = 300.0
EXPLAINED: Final = ("penstock.errors.", "OSError", "TimeoutError", "ConnectionError", "grpc")
# Seen from inside of a node, or with a clock that stands still: the simulator's to check.
UNMEASURED: Final = ("unmatched", "records", "rank_errors", "halts", "wrong_answers")
Place = tuple[str, int]  # topic, partition


async def drain(popper: Popper, topic: Any) -> int:
    """Take everything out, until nothing has come for longer than a lease runs."""
    drained = empty = 0
    async with asyncio.timeout(DRAIN_S_MAX):
        while empty < QUIET_ROUNDS:
            found = await popper.round(topic, plain=True)
            drained += found
            empty = 0 if found else empty + 1
    return drained


async def committed(arena: Arena) -> dict[Place, int]:
    """How far each partition is committed, by its coordinator."""
    partitions = (await arena.status())["partitions"]
    return {(p["topic"], p["partition"]): p["sequence_committed"] for p in partitions}


async def read_logs(arena: Arena, ends: dict[Place, int]) -> dict[tuple[str, Place], list[Batch]]:
    """Every partition's committed log as each node tells it."""
    found: dict[tuple[str, Place], list[Batch]] = {}
    for node in NODES:
        for place, through in ends.items():
            found[node, place] = await read_all(
                arena.url_of(node), place[0], partition=place[1], through=through
            )
    return found


@dataclass
class OnDisk:
    """What a stopped node has of each partition, and what is wrong with it."""

    ends: dict[Place, list[tuple[int, int]]] = field(default_factory=dict)  # sequence, chain
    damage: str | None = None
    unequal: list[Place] = field(default_factory=list)  # a snapshot and the log say different


def read_disk(data: Path, configs: dict[str, TopicConfig], through: dict[Place, int]) -> OnDisk:
    report = verify_folder(data)
    if not report.ok:
        return OnDisk(damage=str(report.first_bad))
    found = OnDisk()
    for (topic, partition), last in through.items():
        config = configs[topic]
        folder = data / "topics" / f"{config.id:08x}" / f"{partition:04x}"
        log = PartitionLog.open(folder, topic=config.id, partition=partition, options=LogOptions())
        batches = list(log.reader.scan(1))
        found.ends[topic, partition] = [(b.last, b.chain) for b in batches if b.last <= last]
        heap = Heap(config, partition=partition)
        for batch in batches:
            heap.apply(batch, batch.columns())
        if replay(log, config).heap.digest() != heap.digest():
            found.unequal.append((topic, partition))
    return found


def mistakes(log: Path) -> Counter[str]:
    """Exceptions that a node wrote down and that no fault explains: the program's own."""
    found: Counter[str] = Counter()
    for line in log.read_bytes().splitlines() if log.exists() else ():
        try:
            trace = str(json.loads(line)["exception"])
        except (ValueError, KeyError, TypeError):
            continue  # another line
        last = trace.strip().splitlines()[-1]
        if not last.startswith(EXPLAINED):
            found[last[:300]] += 1
    return found


class Judge:
    """One checker for each topic; the verdicts are added up."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.checkers = {topic: Checker() for topic in TOPICS}

    def judge(
        self,
        logs: dict[tuple[str, Place], list[Batch]],
        on_disk: dict[str, OnDisk],
    ) -> dict[str, Any]:
        for topic, checker in self.checkers.items():
            with self._history.events_path(topic).open("rb") as lines:
                checker.read(lines)
        for (node, (topic, partition)), batches in logs.items():
            self._add_replica(self.checkers[topic], node, partition, batches)
        for node, found in on_disk.items():
            self._add_disk(node, found)
        for (topic, _), batches in {place: found for (_, place), found in logs.items()}.items():
            self.checkers[topic].add_log(batches)
            self._add_undone(self.checkers[topic], batches)
        return summed([checker.verdict() for checker in self.checkers.values()])

    def _add_disk(self, node: str, found: OnDisk) -> None:
        for (topic, partition), ends in found.ends.items():
            for last, chain in ends:
                self.checkers[topic].add(Committed(partition, f"{node} disk", 0, last, chain))
        for topic, partition in found.unequal:
            self.checkers[topic].broken("unequal", f"heap of {partition} by {node}'s snapshot")

    def _add_replica(
        self, checker: Checker, node: str, partition: int, batches: Sequence[Batch]
    ) -> None:
        for batch in batches:
            checker.add(Committed(partition, f"{node} at rest", 0, batch.last, batch.chain))
            if batch.kind is Kind.BARRIER:
                [name] = batch.columns().binary("node") or [b""]
                checker.add(Entered(partition, batch.epoch, name.decode()))
        last = batches[-1]
        checker.add(AtRest(partition, node, last.last, last.chain, 0))

    def _add_undone(self, checker: Checker, batches: Sequence[Batch]) -> None:
        """Every message was taken out in the end."""
        replay = LogReplay(_ignore)
        for batch in batches:
            for event in log_events(batch):
                replay.add(event)
        done = {(place[0], replay.leases[place]) for place in replay.acked}
        left = [p for p in replay.messages if replay.is_in(p) and p not in done]
        for place in left:
            checker.add(Stuck(f"message {place} was never acknowledged"))


def _ignore(_: str, __: str) -> None:
    """What this second reading finds wrong, the checker finds too."""


def summed(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    problems: list[str] = []
    for verdict in verdicts:
        problems += verdict.problems
        for name in verdict.__struct_fields__:
            if name != "problems":
                total[name] += getattr(verdict, name)
    found: dict[str, Any] = {name: total[name] for name in Verdict.__struct_fields__[:-1]}
    for name in UNMEASURED:
        del found[name]
    found["duplicates_per_producer_key"] = found.pop("duplicates")
    found["ok"] = not any(total[name] for name in VIOLATIONS)
    found["problems"] = problems
    return found


async def settle(arena: Arena, *, within_s: float, say: Callable[[str], None]) -> bool:
    """Wait until all three nodes serve and every replica has everything."""
    try:
        await arena.wait_ready(within_s)
    except PenstockError as error:
        say(f"not ready: {error}")
        return False
    return await arena.in_step(within_s)


async def drain_all(arena: Arena, history: History, urls: Sequence[str]) -> int:
    drained = 0
    async with penstock.connect(urls, api_key=KEY) as client:
        for topic in TOPICS:
            popper = Popper(f"drain-{topic}", urls, history, "drain", topic)
            drained += await drain(popper, client.topic(topic, bytes, create=False))
    return drained
