"""The whole engine against a plain model: a dictionary of messages and a clock moved by hand.

Everything goes through a connection, as a client's requests do; restarts, crashes, snapshots and
compaction are steps like the others, and none of them may change what the model says.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.integration.harness import Node, Row, body, ids_of

from penstock.config import Config, UpkeepOptions
from penstock.log.flush import LogOptions
from penstock.log.verify import verify_folder
from penstock.model.ids import LeaseToken, MessageId
from penstock.node.upkeep import retain

EXAMPLES, STEPS = 30, 30
VISIBILITY_MS, VISIBILITY_MS_MAX = 10_000, 40_000
MAX_RETRIES = 2
RETENTION_MS = 3_600_000
LOG = LogOptions(segment_bytes=8192, allocate_bytes=8192, reserve_bytes=2048)
NEVER = UpkeepOptions(snapshot_s=3600, retention_s=3600)
T = TypeVar("T")


@dataclass
class Message:
    id: str
    payload: bytes
    priority: int
    state: str = "waiting"  # or leased, dead, done
    not_before_ms: int = 0
    attempts: int = 0
    token: str = ""
    granted_ms: int = 0
    deadline_ms: int = 0

    @property
    def place(self) -> tuple[int, int]:
        found = MessageId.parse(self.id)
        return found.partition, found.sequence


class EngineModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(prefix="penstock-model-"))
        path = self.root / "data"
        self.node = Node(path, Config(data=path, log=LOG, upkeep=NEVER, drain_s=5.0))
        self.run(self.node.start())
        self.messages: dict[str, Message] = {}
        self.requests: list[tuple[list[tuple[int, int, bytes]], bool, list[str]]] = []
        self.stale: list[str] = []  # tokens whose leases have ended
        self.numbers = itertools.count(1)
        self.paused = False

    def run(self, work: Awaitable[T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.loop.run_until_complete(bounded())

    def teardown(self) -> None:
        self.run(self.node.stop())
        report = verify_folder(self.node.path)
        self.loop.close()
        shutil.rmtree(self.root)
        assert report.ok, report.first_bad

    # --- the model ---

    @property
    def now_ms(self) -> int:
        return self.node.clock.now_ms()

    def those(self, state: str) -> list[Message]:
        return [m for m in self.messages.values() if m.state == state]

    def ready(self) -> list[Message]:
        sign = 1 if self.mode == "min" else -1
        due = [m for m in self.those("waiting") if m.not_before_ms <= self.now_ms]
        return sorted(due, key=lambda m: (sign * m.priority, m.place[1]))

    def end_lease(self, m: Message, state: str) -> None:
        if m.token:
            self.stale.append(m.token)
        m.state, m.token = state, ""

    def fail(self, m: Message, delay_ms: int) -> None:
        m.attempts += 1
        self.end_lease(m, "waiting" if m.attempts <= MAX_RETRIES else "dead")
        m.not_before_ms = self.now_ms + delay_ms

    def leased(self, data: st.DataObject) -> tuple[list[Message], list[str], list[int]]:
        """Some leases, with stale tokens among them: messages, tokens, lost positions."""
        held = self.those("leased")
        some = data.draw(st.lists(st.sampled_from(held), unique_by=id, max_size=6)) if held else []
        old = data.draw(st.lists(st.sampled_from(self.stale), max_size=2)) if self.stale else []
        tokens = [m.token for m in some] + old
        return some, tokens, list(range(len(some), len(tokens)))

    # --- steps ---

    @initialize(mode=st.sampled_from(["min", "max"]), partitions=st.sampled_from([1, 1, 3]),
                compression=st.sampled_from(["none", "zstd"]))  # fmt: skip
    def begin(self, mode: str, partitions: int, compression: str) -> None:
        self.mode, self.partitions = mode, partitions
        self.run(
            self.node.topic(
                mode=mode, partitions=partitions, compression=compression, backoff_ms_base=0,
                max_retries=MAX_RETRIES, visibility_ms=VISIBILITY_MS,
                visibility_ms_max=VISIBILITY_MS_MAX, retention_ms=RETENTION_MS,
                dlq_retention_ms=RETENTION_MS,
            )
        )  # fmt: skip

    @rule(
        priorities=st.lists(st.integers(-3, 3), min_size=1, max_size=8),
        delay_ms=st.sampled_from([0, 0, 0, 5000]),
        atomic=st.booleans(),
    )
    def enqueue(self, priorities: list[int], delay_ms: int, atomic: bool) -> None:
        rows: list[Row] = [
            {"payload": b"%d" % next(self.numbers) + b"." * 300, "priority": p,
             "delay_ms": delay_ms}
            for p in priorities
        ]  # fmt: skip
        groups = [rows[p :: self.partitions] for p in range(self.partitions)]
        name = f"p{len(self.requests)}"
        parts = [
            (p, len(group), body(group, producer=(f"{name}.{p}", 1, 1)))
            for p, group in enumerate(groups)
            if group
        ]
        answer = self.run(self.node.connection.enqueue("jobs", parts, atomic=atomic))
        assert not answer.duplicates
        ids = ids_of(answer)
        self.requests.append((parts, atomic, ids))
        ordered = [row for group in groups for row in group]
        for message_id, row in zip(ids, ordered, strict=True):
            due_ms = self.now_ms + delay_ms if delay_ms else 0
            self.messages[message_id] = Message(
                message_id, row["payload"], row["priority"], not_before_ms=due_ms
            )

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        parts, atomic, ids = data.draw(st.sampled_from(self.requests))
        answer = self.run(self.node.connection.enqueue("jobs", parts, atomic=atomic))
        assert ids_of(answer) == ids and not answer.placed

    @rule(limit=st.integers(1, 10))
    def pop(self, limit: int) -> None:
        expected = [] if self.paused else self.ready()[:limit]
        popped = self.run(self.node.pop("jobs", limit))
        if self.partitions == 1:
            assert [m["message_id"] for m in popped] == [m.id for m in expected]
        else:  # equal priorities of several partitions have no order
            assert [m["priority"] for m in popped] == [m.priority for m in expected]
        for row in popped:
            m = self.messages[row["message_id"]]
            assert m.state == "waiting" and m.not_before_ms <= self.now_ms
            assert (row["payload"], row["attempts"]) == (m.payload, m.attempts)
            m.state, m.token = "leased", row["lease_token"]
            m.granted_ms, m.deadline_ms = self.now_ms, self.now_ms + VISIBILITY_MS

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        some, tokens, lost = self.leased(data)
        if tokens:
            parsed = [LeaseToken.parse(token) for token in tokens]
            assert self.run(self.node.connection.settle("jobs", parsed)) == lost
        for m in some:
            self.end_lease(m, "done")

    @rule(data=st.data(), delay_ms=st.sampled_from([None, 0, 3000]), counted=st.booleans())
    def nack(self, data: st.DataObject, delay_ms: int | None, counted: bool) -> None:
        some, tokens, lost = self.leased(data)
        if tokens:
            parsed = [LeaseToken.parse(token) for token in tokens]
            give_back = self.node.connection.give_back
            answer = self.run(give_back("jobs", parsed, delay_ms=delay_ms, counted=counted))
            assert answer == lost
        for m in some:
            if counted:
                self.fail(m, delay_ms or 0)
            else:
                self.end_lease(m, "waiting")
                m.not_before_ms = self.now_ms + (delay_ms or 0)

    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        some, tokens, lost = self.leased(data)
        if tokens:
            parsed = [LeaseToken.parse(token) for token in tokens]
            give_back = self.node.connection.give_back
            assert self.run(give_back("jobs", parsed, reject=True, reason="no")) == lost
        for m in some:
            self.end_lease(m, "dead")

    @rule(data=st.data(), extend_ms=st.sampled_from([1, 5000, VISIBILITY_MS_MAX]))
    def extend(self, data: st.DataObject, extend_ms: int) -> None:
        some, tokens, lost = self.leased(data)
        if tokens:
            parsed = [LeaseToken.parse(token) for token in tokens]
            assert self.run(self.node.connection.extend("jobs", parsed, extend_ms)) == lost
        for m in some:
            left = m.granted_ms + VISIBILITY_MS_MAX - self.now_ms
            until_ms = self.now_ms + max(0, min(extend_ms, left))
            m.deadline_ms = max(m.deadline_ms, until_ms)
        self.wait(0)

    @rule(seconds=st.sampled_from([0.5, 3, 10, 30]))
    def wait(self, seconds: float) -> None:
        """Time passes; timers that fall due one after the other need a moment each."""
        self.run(self.node.advance(seconds))
        heaps = [p.heap for p in self.node.engine.topics["jobs"].partitions]
        while any((due := h.leases.next_ms()) is not None and due <= self.now_ms for h in heaps):
            self.run(self.node.advance(0.001))
        for m in self.those("leased"):
            if m.deadline_ms <= self.now_ms:
                self.fail(m, 0)

    @precondition(lambda self: self.those("waiting") or self.those("leased"))
    @rule(data=st.data())
    def move_to_dlq(self, data: st.DataObject) -> None:
        m = data.draw(st.sampled_from(self.those("waiting") + self.those("leased")))
        self.run(self.node.call("move_to_dlq", topic="jobs", message_id=m.id))
        self.end_lease(m, "dead")

    @rule(limit=st.integers(1, 4))
    def replay(self, limit: int) -> None:
        dead = sorted(self.those("dead"), key=lambda m: m.place)[:limit]
        found = self.run(self.node.call("dlq_replay", topic="jobs", limit=limit))
        assert found == {"replayed": len(dead)}
        for m in dead:
            m.state, m.attempts, m.not_before_ms = "waiting", 0, 0

    @rule()
    def delete_dead(self) -> None:
        dead = self.those("dead")
        assert self.run(self.node.forced("dlq_delete", "jobs")) == {"deleted": len(dead)}
        for m in dead:
            m.state = "done"

    @rule()
    def purge(self) -> None:
        waiting = self.those("waiting")
        assert self.run(self.node.forced("purge", "jobs")) == {"purged": len(waiting)}
        for m in waiting:
            m.state = "done"

    @rule()
    def pause_or_resume(self) -> None:
        self.paused = not self.paused
        self.run(self.node.update("jobs", paused=self.paused))

    @rule(how=st.sampled_from(["clean", "crash"]), snapshot=st.booleans())
    def restart(self, how: str, snapshot: bool) -> None:
        if snapshot:
            self.run(self.node.call("snapshot", topic="jobs"))
        self.run(self.node.restart() if how == "clean" else self.node.crash())
        for m in self.those("leased"):
            m.deadline_ms = max(m.deadline_ms, self.now_ms + VISIBILITY_MS)

    @rule()
    def compact(self) -> None:
        """Upkeep when everything is past its retention: dead letters go, and dead bytes."""
        for _ in range(2):
            self.run(self.node.call("snapshot", topic="jobs"))
        topic = self.node.engine.topics["jobs"]
        for partition in topic.partitions:
            self.run(
                retain(
                    self.node.engine.hosts[topic.key(partition.index)],
                    self.now_ms + RETENTION_MS + 1,
                )
            )
        self.run(self.node.settled())
        for m in self.those("dead"):
            m.state = "done"

    # --- what always holds ---

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "mode"):
            return
        ready = len(self.ready())
        waiting, leased, dead = (len(self.those(s)) for s in ("waiting", "leased", "dead"))
        assert self.run(self.node.counts()) == (ready, waiting - ready, leased, dead)
        for partition in self.node.engine.topics["jobs"].partitions:
            partition.heap.validate()

    @invariant()
    def dead_letters_agree(self) -> None:
        if hasattr(self, "mode"):
            listed = self.run(self.node.dead("jobs", limit=1000))
            expected = sorted(self.those("dead"), key=lambda m: m.place)
            assert [(m["message_id"], m["payload"]) for m in listed] == [
                (m.id, m.payload) for m in expected
            ]


def test_the_engine_does_what_the_model_says() -> None:
    run: Any = run_state_machine_as_test
    run(
        EngineModel,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
