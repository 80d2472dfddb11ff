"""The heap against a plain model: dictionaries, sorted lists, one object per message.

Every step goes through the log, as in a node: ask, write the record, apply it. After each step
the heap and the model must agree, the heap's own invariants must hold, and at the end a second
heap that replays the log must have the same digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.errors import StaleProducer
from penstock.heap.machine import Heap
from penstock.heap.transactions import ABORTED_MS, SharePlace, pack_places
from penstock.model.batch import SCHEMAS, Batch, Codec, Kind
from penstock.model.topic import Mode, TopicConfig, topic_config

EXAMPLES = 40
DEDUP_MS = 60_000
WORST = (1 << 63) - 1
PLACE = pack_places([SharePlace(1, 5)])  # another partition's share of an atomic batch


@dataclass
class Message:
    sequence: int
    priority: int
    time_ms: int
    max_retries: int | None
    state: str = "waiting"  # waiting, leased, dead, prepared
    not_before_ms: int = 0
    attempts: int = 0
    reason: int = 0
    dead_ms: int = 0
    detail: bytes = b""


@dataclass
class Lease:
    sequence: int
    consumer: bytes
    visibility_ms: int
    granted_ms: int
    deadline_ms: int


@dataclass
class Model:
    """What the heap should be, written for reading."""

    config: TopicConfig
    messages: dict[int, Message] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    producers: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # epoch, last time
    placed: dict[tuple[bytes, int, int], tuple[int, int]] = field(default_factory=dict)
    prepared: dict[bytes, list[int]] = field(default_factory=dict)
    decided: dict[bytes, tuple[bool, int]] = field(default_factory=dict)  # outcome, its time
    unconfirmed: set[bytes] = field(default_factory=set)  # decided for, others may ask

    def key(self, message: Message) -> tuple[int, int]:
        key = message.priority if self.config.mode is Mode.MIN else ~message.priority
        key += self.config.ageing_per_s * message.time_ms // 1000
        return min(key, WORST), message.sequence

    def ready(self, now: int) -> list[int]:
        ready = [
            m for m in self.messages.values() if m.state == "waiting" and m.not_before_ms <= now
        ]
        return [m.sequence for m in sorted(ready, key=self.key)]

    def count(self, state: str) -> int:
        return sum(m.state == state for m in self.messages.values())

    def limit(self, message: Message) -> int:
        return self.config.max_retries if message.max_retries is None else message.max_retries

    def release(self, token: int) -> Message | None:
        lease = self.leases.pop(token, None)
        return None if lease is None else self.messages[lease.sequence]

    def release_message(self, sequence: int) -> None:
        for token in [t for t, lease in self.leases.items() if lease.sequence == sequence]:
            del self.leases[token]


entry = st.tuples(
    st.one_of(st.integers(-3, 3), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.sampled_from([0, 0, 0, 1, 500, 5_000]),  # delay
    st.sampled_from([None, None, 0, 1, 5]),  # retries
)
entries = st.lists(entry, min_size=1, max_size=12)
picks = st.lists(st.integers(0, 1 << 30), min_size=1, max_size=8)


names = st.sampled_from([b"tx%d" % i for i in range(6)])


class HeapMachine(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(Mode),
        ageing=st.sampled_from([0, 0, 1, 10**9]),
        dlq=st.booleans(),
        skip=st.sampled_from([1, 4090, 9000]),
    )
    def start(self, mode: Mode, ageing: int, dlq: bool, skip: int) -> None:
        config = topic_config(
            {"name": "t", "id": 7, "mode": mode.value, "ageing_per_s": ageing, "dlq": dlq,
             "dedup_ms": DEDUP_MS, "max_retries": 2, "visibility_ms_max": 100_000}
        )  # fmt: skip
        self.first_config = config
        self.model = Model(config)
        self.heap = self.forgetful(Heap(config, partition=3))
        self.log: list[Batch] = []
        self.now = 1_700_000_000_000
        self.write(Kind.SNAPSHOT_MARK, skip, {"through": [0]})

    @staticmethod
    def forgetful(heap: Heap) -> Heap:
        heap.transactions.decided_max = 1
        return heap

    # --- the log ---

    def write(self, kind: Kind, count: int, values: dict[str, Any], *, runs: int = 0) -> Batch:
        body = SCHEMAS[kind].encode(count, values, runs=runs)
        batch = Batch(
            kind, Codec.NONE, False, 7, 3, 1, 1, self.heap.sequence_applied + 1,
            self.heap.sequence_applied + count, count, self.now, len(body), 0, b"", body,
        )  # fmt: skip
        self.log.append(batch)
        self.applied = self.heap.apply(batch, batch.columns())
        return batch

    def tokens(self, picked: list[int]) -> list[int]:
        """Some held tokens, and some that are not."""
        held = sorted(self.model.leases)
        return list(dict.fromkeys(held[p % len(held)] if held and p % 5 else p for p in picked))

    # --- entering ---

    def add(self, batch: Batch, rows: list[Any], *, state: str = "waiting") -> list[int]:
        for i, (priority, delay, retries) in enumerate(rows):
            message = Message(batch.first + i, priority, batch.time_ms, retries, state)
            message.not_before_ms = batch.time_ms + delay if delay else 0
            self.model.messages[message.sequence] = message
        return list(range(batch.first, batch.first + len(rows)))

    @staticmethod
    def columns_of(rows: list[Any]) -> dict[str, Any]:
        values: dict[str, Any] = {"priority": [p for p, _, _ in rows]}
        if any(d for _, d, _ in rows):
            values["delay_ms"] = [d for _, d, _ in rows]
        if any(r is not None for _, _, r in rows):
            values["max_retries"] = [-1 if r is None else r for _, _, r in rows]
        return values

    @rule(rows=entries)
    def enqueue(self, rows: list[Any]) -> None:
        self.add(self.write(Kind.ENQ, len(rows), self.columns_of(rows)), rows)
        assert self.applied.enqueued == len(rows)

    @rule(
        rows=entries,
        producer=st.sampled_from([b"a", b"b"]),
        epoch=st.integers(1, 2),
        first=st.integers(0, 20),
        transaction=st.one_of(st.none(), names),
    )
    def enqueue_once(
        self, rows: list[Any], producer: bytes, epoch: int, first: int, transaction: bytes | None
    ) -> None:
        """An idempotent enqueue or a share of an atomic batch: only what is new is written."""
        model = self.model
        known_epoch, last_ms = model.producers.get(producer, (0, 0))
        body = self.body(rows, producer, epoch, first)
        try:
            found = self.heap.dedup.admit(SCHEMAS[Kind.ENQ].decode(body, len(rows)))
        except StaleProducer:
            assert epoch < known_epoch
            return
        assert epoch >= known_epoch or last_ms < self.now - DEDUP_MS
        duplicates = {first + i: (sequence, time_ms) for i, sequence, time_ms in found}
        for i in range(len(rows)):
            place = model.placed.get((producer, epoch, first + i))
            if first + i in duplicates:
                assert place == duplicates[first + i]
            else:
                assert place is None or place[1] < self.now - DEDUP_MS
        fresh = [i for i in range(len(rows)) if first + i not in duplicates]
        if fresh:
            self.write_fresh([rows[i] for i in fresh], producer, epoch, first, fresh, transaction)

    def write_fresh(
        self, rows: list[Any], producer: bytes, epoch: int, first: int, fresh: list[int],
        transaction: bytes | None,
    ) -> None:  # fmt: skip
        values = self.columns_of(rows) | {
            "run_count": [1] * len(fresh),
            "run_epoch": [epoch] * len(fresh),
            "run_sequence": [first + i for i in fresh],
            "run_producer": [producer] * len(fresh),
        }
        if transaction is None:
            sequences = self.add(self.write(Kind.ENQ, len(rows), values, runs=len(fresh)), rows)
        else:
            values |= {"transaction": [transaction], "home": [1]}
            batch = self.write(Kind.PREPARE, len(rows), values, runs=len(fresh))
            sequences = self.add(batch, rows, state="prepared")
            self.model.prepared.setdefault(transaction, []).extend(sequences)
        if epoch != self.model.producers.get(producer, (0, 0))[0]:
            for key in [k for k in self.model.placed if k[0] == producer]:
                del self.model.placed[key]
        self.model.producers[producer] = (epoch, self.now)
        for i, sequence in zip(fresh, sequences, strict=True):
            self.model.placed[producer, epoch, first + i] = (sequence, self.now)
        if transaction in self.model.decided:
            self.conclude(transaction, self.model.decided[transaction][0])

    def body(self, rows: list[Any], producer: bytes, epoch: int, first: int) -> bytes:
        runs = {
            "run_count": [len(rows)], "run_epoch": [epoch], "run_sequence": [first],
            "run_producer": [producer],
        }  # fmt: skip
        return SCHEMAS[Kind.ENQ].encode(len(rows), self.columns_of(rows) | runs, runs=1)

    @rule(transaction=names, commit=st.booleans(), others=st.sampled_from([b"", PLACE, PLACE * 2]))
    def decide(self, transaction: bytes, commit: bool, others: bytes) -> None:
        values = {"transaction": [transaction], "commit": [int(commit)], "participants": [others]}
        self.write(Kind.DECIDE, 1, values)
        if transaction not in self.model.decided:
            self.model.decided[transaction] = (commit, self.now)
            if commit and others:
                self.model.unconfirmed.add(transaction)
            self.conclude(transaction, commit)
        assert self.heap.transactions.outcome(transaction) is self.model.decided[transaction][0]
        self.forget()

    @precondition(lambda self: self.model.unconfirmed)
    @rule(picked=picks, stranger=st.booleans())
    def confirm(self, picked: list[int], stranger: bool) -> None:
        kept = sorted(self.model.unconfirmed)
        some = list(dict.fromkeys(kept[p % len(kept)] for p in picked)) + [b"?"] * stranger
        self.write(Kind.DECIDE, len(some), {"transaction": some, "commit": [2] * len(some)})
        self.model.unconfirmed -= set(some)
        assert self.heap.transactions.outcome(b"?") is None
        self.forget()

    def forget(self) -> None:
        """Which outcomes the heap gives up is its own affair, as long as nobody can miss them."""
        outcomes = {name: self.heap.transactions.outcome(name) for name in self.model.decided}
        known = {name for name, outcome in outcomes.items() if outcome is not None}
        for name in self.model.decided.keys() - known:
            commit, time_ms = self.model.decided.pop(name)
            assert name not in self.model.unconfirmed, "somebody may still ask for a commit"
            assert commit or time_ms <= self.now - ABORTED_MS, "a driver may still come"
        rest = [n for n, (commit, _) in self.model.decided.items() if commit]
        assert len(set(rest) - self.model.unconfirmed) <= 1

    def conclude(self, transaction: bytes, commit: bool) -> None:
        sequences = self.model.prepared.pop(transaction, [])
        for sequence in sequences:
            if commit:
                self.model.messages[sequence].state = "waiting"
            else:
                del self.model.messages[sequence]
        if not commit:
            gone = set(sequences)
            placed = self.model.placed
            self.model.placed = {k: v for k, v in placed.items() if v[0] not in gone}

    # --- delivery ---

    @rule(
        n=st.integers(1, 20), runs=st.integers(1, 3), visibility=st.sampled_from([1, 1000, 90_000])
    )
    def lease_best(self, n: int, runs: int, visibility: int) -> None:
        best = self.model.ready(self.now)[:n]
        assert self.heap.select(n, self.now).tolist() == best
        self.lease(best, runs, visibility)

    @rule(picked=picks)
    def lease_some(self, picked: list[int]) -> None:
        """Whatever another coordinator may have chosen: no stale pair may confuse the index."""
        waiting = [m.sequence for m in self.model.messages.values() if m.state == "waiting"]
        some = {waiting[p % len(waiting)] for p in picked} if waiting else set()
        self.lease(sorted(some, reverse=True), 1, 1000)

    def lease(self, messages: list[int], runs: int, visibility: int) -> None:
        if not messages:
            return
        sizes = [len(messages) // runs] * runs
        sizes[0] += len(messages) - sum(sizes)
        consumers = [b"c%d" % i for i in range(runs)]
        values = {
            "message": np.array(messages, np.uint64), "run_count": sizes,
            "run_visibility_ms": [visibility] * runs, "run_consumer": consumers,
        }  # fmt: skip
        batch = self.write(Kind.LEASE, len(messages), values, runs=runs)
        owners = [c for c, size in zip(consumers, sizes, strict=True) for _ in range(size)]
        for i, (sequence, owner) in enumerate(zip(messages, owners, strict=True)):
            lease = Lease(sequence, owner, visibility, self.now, self.now + visibility)
            self.model.leases[batch.first + i] = lease
            self.model.messages[sequence].state = "leased"

    @rule(picked=picks)
    def ack(self, picked: list[int]) -> None:
        tokens = self.tokens(picked)
        self.write(Kind.ACK, len(tokens), {"token": tokens})
        done = [m for m in map(self.model.release, tokens) if m is not None]
        for message in done:
            del self.model.messages[message.sequence]
        assert self.applied.acked == sum(self.applied.released.values()) == len(done)

    @precondition(lambda self: self.model.leases)
    @rule()
    def ack_everything(self) -> None:
        tokens = sorted(self.model.leases)
        self.write(Kind.ACK, len(tokens), {"token": tokens})
        for token in tokens:
            message = self.model.release(token)
            del self.model.messages[message.sequence]

    @rule(picked=picks, delay=st.sampled_from([None, 0, 700]), counted=st.booleans())
    def nack(self, picked: list[int], delay: int | None, counted: bool) -> None:
        self.give_back(Kind.NACK, self.tokens(picked), delay, counted)

    @rule()
    def expire(self) -> None:
        due = {t for t, lease in self.model.leases.items() if lease.deadline_ms <= self.now}
        some = self.heap.expired(self.now, 3).tolist()
        assert set(some) <= due and len(some) == min(3, len(due))
        tokens = self.heap.expired(self.now, 1000).tolist()
        assert sorted(tokens) == sorted(due)
        self.give_back(Kind.EXPIRE, tokens, None, True)

    def give_back(self, kind: Kind, tokens: list[int], delay: int | None, counted: bool) -> None:
        asked = np.array(tokens, np.uint64)
        plan = self.heap.plan_return(asked, self.now, delay_ms=delay, counted=counted)
        held = [t for t in tokens if t in self.model.leases]
        assert sorted(plan.tokens.tolist() + plan.dead.tolist()) == sorted(held)
        if len(plan.tokens):
            values = {"token": plan.tokens, "not_before_ms": plan.not_before_ms}
            if kind is Kind.NACK:
                values["counted"] = np.full(len(plan.tokens), counted, np.uint8)
            self.write(kind, len(plan.tokens), values)
        for token, when in zip(plan.tokens.tolist(), plan.not_before_ms.tolist(), strict=True):
            message = self.model.release(token)
            self.check_delay(message, when - self.now, delay, counted)
            message.state, message.not_before_ms = "waiting", when
            message.attempts += counted
        for token in plan.dead.tolist():
            message = self.model.messages[self.model.leases[token].sequence]
            assert counted and message.attempts + 1 > self.model.limit(message)
        self.bury(plan.dead.tolist(), 1, b"")

    def check_delay(self, message: Message, wait: int, delay: int | None, counted: bool) -> None:
        if delay is not None or not counted:
            assert wait == (delay or 0)
        else:
            assert message.attempts + 1 <= self.model.limit(message)
            config = self.model.config
            cap = min(config.backoff_ms_base * 2**message.attempts, config.backoff_ms_cap)
            assert 0 <= wait <= cap

    @rule(picked=picks, extend=st.sampled_from([10, 5000, 200_000]))
    def extend(self, picked: list[int], extend: int) -> None:
        tokens = np.array(self.tokens(picked), np.uint64)
        allowed = self.heap.cap_extend(tokens, self.now, extend)
        for token, ms in zip(tokens.tolist(), allowed.tolist(), strict=True):
            lease = self.model.leases.get(token)
            left = 0 if lease is None else lease.granted_ms + 100_000 - self.now
            assert ms == max(0, min(extend, left))
            if lease is not None:
                lease.deadline_ms = max(lease.deadline_ms, self.now + ms)
        self.write(Kind.EXTEND, len(tokens), {"token": tokens, "extend_ms": allowed})

    @rule()
    def barrier(self) -> None:
        self.write(Kind.BARRIER, 1, {"node": [b"n"]})
        for lease in self.model.leases.values():
            lease.deadline_ms = max(lease.deadline_ms, self.now + lease.visibility_ms)

    # --- dead letters and administration ---

    @rule(picked=picks, detail=st.sampled_from([b"", b"bad", b"x" * 2000]))
    def reject(self, picked: list[int], detail: bytes) -> None:
        self.bury(self.tokens(picked), 2, detail)

    def bury(self, tokens: list[int], reason: int, detail: bytes) -> None:
        if not tokens:
            return
        n = len(tokens)
        self.write(Kind.DEAD, n, {"token": tokens, "reason": [reason] * n, "detail": [detail] * n})
        for token in tokens:
            message = self.model.release(token)
            if message is not None:
                self.die(message, reason, detail)

    def die(self, message: Message, reason: int, detail: bytes) -> None:
        if self.model.config.dlq:
            message.state, message.dead_ms, message.reason = "dead", self.now, reason
            message.detail = detail[:1024]
        else:
            del self.model.messages[message.sequence]

    def choose(self, picked: list[int]) -> list[int]:
        known = sorted(self.model.messages)
        return [known[p % len(known)] if known and p % 7 else p % 30 for p in picked]

    @rule(picked=picks)
    def move_to_dlq(self, picked: list[int]) -> None:
        chosen = self.choose(picked)
        n = len(chosen)
        self.write(Kind.DEAD, n, {"message": chosen, "reason": [3] * n, "detail": [b"why"] * n})
        for sequence in set(chosen):
            message = self.model.messages.get(sequence)
            if message is not None and message.state in ("waiting", "leased"):
                self.model.release_message(sequence)
                self.die(message, 3, b"why")

    @rule(picked=picks)
    def replay(self, picked: list[int]) -> None:
        chosen = self.choose(picked)
        self.write(Kind.REPLAY, len(chosen), {"message": chosen})
        for sequence in chosen:
            message = self.model.messages.get(sequence)
            if message is not None and message.state == "dead":
                message.state, message.attempts, message.not_before_ms = "waiting", 0, 0

    @rule(picked=picks)
    def delete(self, picked: list[int]) -> None:
        chosen = self.choose(picked)
        self.write(Kind.ACK, len(chosen), {"message": chosen})
        for sequence in chosen:
            message = self.model.messages.get(sequence)
            if message is not None and message.state != "prepared":
                self.model.release_message(sequence)
                del self.model.messages[sequence]

    @rule(share=st.floats(0, 1))
    def purge(self, share: float) -> None:
        known = sorted(self.model.messages)
        through = known[int(share * (len(known) - 1))] if known else 5
        before = len(self.heap.alive(1, 1 << 62))
        self.write(Kind.ACK, 1, {"through": [through]})
        gone = [s for s in known if s <= through and self.model.messages[s].state == "waiting"]
        for sequence in gone:
            del self.model.messages[sequence]
        assert before - len(self.heap.alive(1, 1 << 62)) == len(gone)

    @rule(ageing=st.sampled_from([0, 1, 1000]), dlq=st.booleans(), retries=st.integers(0, 3))
    def configure(self, ageing: int, dlq: bool, retries: int) -> None:
        changes = {"ageing_per_s": ageing, "dlq": dlq, "max_retries": retries}
        self.model.config = self.model.config.updated(changes)
        self.write(Kind.CONFIG, 1, {"config": [msgspec.msgpack.encode(self.model.config)]})

    # --- time and restarts ---

    @rule(ms=st.sampled_from([0, 1, 400, 3_000, 40_000]))
    def pass_time(self, ms: int) -> None:
        self.now += ms

    @rule(n=st.sampled_from([1, 50, 4096, 10_000]))
    def skip_sequences(self, n: int) -> None:
        self.write(Kind.SNAPSHOT_MARK, n, {"through": [0]})

    @rule()
    def restart_from_snapshot(self) -> None:
        data = b"".join(self.heap.snapshot())
        restored = self.forgetful(Heap.restore(self.first_config, data, partition=3))
        assert b"".join(restored.snapshot()) == data
        assert restored.digest() == self.heap.digest()
        self.heap = restored

    @rule()
    def look(self) -> None:
        ready = self.model.ready(self.now)
        assert self.heap.select(1000, self.now).tolist() == ready
        assert self.heap.ready == len(ready)
        for rank, sequence in enumerate(ready[::3]):
            key = self.model.key(self.model.messages[sequence])
            assert self.heap.rank(*key, self.now) == 3 * rank

    # --- always ---

    @invariant()
    def agree(self) -> None:
        heap, model = self.heap, self.model
        heap.validate()
        assert heap.transactions.unconfirmed.keys() == model.unconfirmed
        for name, (commit, _) in model.decided.items():
            assert heap.transactions.outcome(name) is commit
        assert heap.ready + heap.delayed == model.count("waiting")
        assert (heap.leased, heap.dead) == (model.count("leased"), model.count("dead"))
        assert heap.alive(1, heap.sequence_applied).tolist() == sorted(model.messages)
        assert heap.oldest_alive() == min(model.messages, default=None)
        known = np.array(sorted(model.messages), np.uint64)
        tries = [model.messages[s].attempts for s in known.tolist()]
        waiting = [m for _, m in sorted(model.messages.items()) if m.state == "waiting"]
        at = heap.table.places(np.array([m.sequence for m in waiting], np.uint64))
        assert heap.table.until_ms[at].tolist() == [m.not_before_ms for m in waiting]
        assert heap.attempts(known).tolist() == tries
        for consumer in (b"c0", b"c1", b"c2"):
            held = sum(lease.consumer == consumer for lease in model.leases.values())
            assert heap.leases_of(consumer) == held
        tokens = np.array([*model.leases, 1], np.uint64)
        messages, held = heap.resolve(tokens)
        assert messages.tolist() == [lease.sequence for lease in model.leases.values()] + [0]
        assert held.tolist() == [True] * len(model.leases) + [False]
        rows = [
            (r.sequence, r.time_ms, r.reason, r.attempts, r.detail) for r in heap.dead_list(0, 99)
        ]
        dead = sorted(
            (m for m in model.messages.values() if m.state == "dead"), key=lambda m: m.sequence
        )
        assert rows == [(m.sequence, m.dead_ms, m.reason, m.attempts, m.detail) for m in dead]

    @invariant()
    def wakes_in_time(self) -> None:
        model = self.model
        deadlines = [lease.deadline_ms for lease in model.leases.values()]
        assert self.heap.leases.next_ms() == min(deadlines, default=None)
        due = deadlines + [
            m.not_before_ms
            for m in model.messages.values()
            if m.state == "waiting" and m.not_before_ms > self.now
        ]
        wakeup = self.heap.next_wakeup()
        assert not due or (wakeup is not None and wakeup <= min(due))

    def teardown(self) -> None:
        if not hasattr(self, "heap"):
            return
        replica = self.forgetful(Heap(self.first_config, partition=3))
        for batch in self.log:
            replica.apply(batch, batch.columns())
        replica.validate()
        assert replica.digest() == self.heap.digest()
        ready = self.model.ready(self.now)
        assert replica.select(1000, self.now).tolist() == ready


def test_heap_agrees_with_the_model() -> None:
    run_state_machine_as_test(
        HeapMachine, settings=settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
    )


def test_heap_agrees_with_the_model_when_its_index_has_tiny_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refills, spills, seals and merges at every turn instead of every few thousand messages."""
    for name, value in {"FRONT": 2, "FRONT_MAX": 4, "SEAL": 8, "CHUNK": 3}.items():
        monkeypatch.setattr(f"penstock.heap.index.{name}", value)
    monkeypatch.setattr("penstock.heap.index.FAN", 3)
    monkeypatch.setattr("penstock.heap.index.HEAD_MIN", 1)
    monkeypatch.setattr("penstock.heap.state.PROMOTE", 2)
    run_state_machine_as_test(
        HeapMachine, settings=settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
    )
