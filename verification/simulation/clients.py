"""Those who use the cluster: producers that retry, consumers of all speeds, atomic batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.heap.transactions import SharePlace
from verification.events import (
    Delivered,
    Enqueued,
    Enqueuing,
    Extended,
    Released,
    Settled,
    digest_of,
)
from verification.simulation.caller import Caller
from verification.simulation.schedule import MS
from verification.simulation.tenure import (
    Decide,
    Enqueue,
    Entries,
    Pop,
    Prepare,
    Request,
    Settle,
)

if TYPE_CHECKING:
    from verification.simulation.simulation import Simulation

VISIBILITY_MS: Final = (400, 3000)
PRIORITIES: Final = 5


class Client:
    """A process that outlives the faults, with a network of its own to the nodes."""

    up, refuses, life = True, True, 1

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        self.schedule = simulation.schedule
        self.caller = Caller(simulation, self)
        self.busy = False

    def run(self, action: Callable[..., None], *args: Any) -> None:
        action(*args)

    def after(self, delay_us: int, action: Callable[..., None], *args: Any) -> None:
        self.schedule.after(delay_us, action, *args)

    def on_reply(self, number: int, answer: Any) -> None:
        self.caller.on_reply(number, answer)

    def insist(self, request: Request, on_answer: Callable[[Any, int], None]) -> None:
        self.busy = True

        def answered(answer: Any, doubts: int) -> None:
            self.busy = False
            self.simulation.log(self.name, request, answer)
            on_answer(answer, doubts)

        self.caller.insist(request, answered)

    def some_partition(self) -> int:
        return self.schedule.between(0, self.simulation.profile.partitions - 1)

    def start(self) -> None:
        self.after(self.schedule.between(0, 300 * MS), self.next)

    def next(self) -> None:
        raise NotImplementedError

    def later(self, low_ms: int, high_ms: int) -> None:
        """Go on after a pause, unless it is time to come to an end."""
        if not self.simulation.closing:
            self.after(self.schedule.skewed(low_ms * MS, high_ms * MS), self.next)


class Producer(Client):
    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        self._next = 1
        self._last_known: dict[int, int] = {}  # partition -> last message it knows of

    def entries(self, count: int) -> Entries:
        first, self._next = self._next, self._next + count
        priorities = tuple(self.schedule.between(0, PRIORITIES) for _ in range(count))
        longest_ms = self.simulation.profile.delay_ms_max
        delay_ms = self.schedule.between(1, longest_ms) if self.schedule.chance(0.1) else 0
        return Entries(self.name.encode(), 1, first, priorities, delay_ms)

    def next(self) -> None:
        partition = self.some_partition()
        entries = self.entries(self.schedule.skewed(1, 8))
        expected = None
        if self.schedule.chance(0.1):
            expected = self._last_known.get(partition)
        self.tell_sending(entries, partition)
        request = Enqueue(partition, entries, expected)

        def answered(answer: Any, doubts: int) -> None:
            if answer[0] == "ok":
                self.tell_told(entries, partition, answer[1])
                self._last_known[partition] = answer[1] + entries.count - 1
            elif answer[1] != "sequence_conflict":
                self.simulation.checker.broken("wrong_answers", f"{request}: {answer}")
            elif doubts == 0:
                self.simulation.checker.on_refused(entries.producer, 1, entries.first)
            self.later(5, 250)

        self.insist(request, answered)

    def tell_sending(self, entries: Entries, partition: int) -> None:
        digests = [digest_of(payload) for payload in entries.payloads]
        self.simulation.checker.add(
            Enqueuing(
                self.schedule.now, entries.producer.decode(), entries.epoch, entries.first,
                entries.count, partition, digests,
            )
        )  # fmt: skip

    def tell_told(self, entries: Entries, partition: int, first: int) -> None:
        self.simulation.checker.add(
            Enqueued(
                self.schedule.now, entries.producer.decode(), entries.epoch, entries.first,
                entries.count, partition, first,
            )
        )  # fmt: skip


class Consumer(Client):
    """Takes some messages and settles them, quickly or slowly, well or badly."""

    def next(self) -> None:
        visibility_ms = self.schedule.between(*VISIBILITY_MS)
        count = self.schedule.skewed(1, 6)
        request = Pop(self.some_partition(), self.name.encode(), count, visibility_ms)
        asked = self.schedule.now

        def answered(answer: Any, doubts: int) -> None:
            until = asked + visibility_ms * MS
            if answer[0] == "ok":
                for message, token, payload in answer[1]:
                    self.take(request.partition, message, token, payload=payload, until=until)
            self.later(5, 400)

        # One attempt: what became of a pop that was not answered is for the deadline to settle.
        self.busy = True

        def done(answer: Any) -> None:
            self.busy = False
            answered(answer, 0)

        self.caller.call(request, done)

    def take(
        self, partition: int, message: int, token: int, *, payload: bytes | None, until: int
    ) -> None:
        now = self.schedule.now
        digest = None if payload is None else digest_of(payload)
        self.simulation.checker.add(
            Delivered(now, self.name, partition, message, token, until, digest)
        )
        if now >= until or self.schedule.chance(0.1):
            return  # too late, or it forgets it
        work = self.schedule.skewed(1 * MS, 1500 * MS)
        self.after(work, self.settle, partition, token)

    def settle(self, partition: int, token: int) -> None:
        how = self.schedule.rng.choices(["ack", "nack", "extend", "reject"], [80, 8, 8, 4])[0]
        ms = self.schedule.between(0, 800) if how in ("nack", "extend") else 0
        asked = self.schedule.now
        checker = self.simulation.checker
        if how != "extend":
            checker.add(Released(asked, partition, token))
        request = Settle(partition, token, how, ms)
        self.insisting += 1

        def answered(answer: Any, doubts: int) -> None:
            self.insisting -= 1
            if answer[0] == "ok" and how == "ack":
                checker.add(Settled(self.schedule.now, partition, token))
            elif answer[0] == "ok" and how == "extend":
                checker.add(Extended(partition, token, asked + ms * MS))
                self.after(self.schedule.skewed(1 * MS, 500 * MS), self.settle, partition, token)
            elif answer[0] not in ("ok", "lost"):
                checker.broken("wrong_answers", f"{request}: {answer}")

        self.caller.insist(request, answered)

    insisting = 0


class AtomicProducer(Producer):
    """All-or-none batches over all partitions: prepare in each, decide in one, repeat."""

    def next(self) -> None:
        self._number = getattr(self, "_number", 0) + 1
        partitions = self.simulation.profile.partitions
        parts = [(p, self.entries(self.schedule.between(1, 3))) for p in range(partitions)]
        for partition, entries in parts:
            self.tell_sending(entries, partition)
        self.simulation.checker.on_atomic(
            [(e.producer.decode(), e.epoch, e.first, e.count, p) for p, e in parts]
        )
        self.busy = True
        self.attempt(parts, 1)

    def attempt(self, parts: list[tuple[int, Entries]], number: int) -> None:
        """One transaction; a batch that was decided against is tried again as another one."""
        transaction = b"%s:%d:%d" % (self.name.encode(), parts[0][1].first, number)
        home = parts[(self._number + number) % len(parts)][0]
        placed: dict[int, int] = {}
        verdicts: dict[int, str] = {}

        def prepared(partition: int, answer: Any) -> None:
            verdicts[partition] = answer[0]
            if answer[0] in ("ok", "known"):
                placed[partition] = answer[1]
            if len(verdicts) < len(parts):
                return
            fine = all(v in ("ok", "known") for v in verdicts.values())
            if all(v == "known" for v in verdicts.values()):
                self.finish(parts, placed)
                return
            # Now and then so late that a participant has asked, and it was decided against.
            late = self.schedule.chance(0.1)
            self.after(self.schedule.between(1, 4) * 1000 * MS if late else 0, decide, fine)

        def decide(commit: bool) -> None:
            fresh = [partition for partition, _ in parts if verdicts[partition] == "ok"]
            places = tuple(SharePlace(partition, placed[partition]) for partition in fresh)
            self.caller.insist(Decide(home, transaction, commit, places), decided)

        def decided(answer: Any, doubts: int) -> None:
            commit = answer[1]
            for partition, _ in parts:
                if partition != home and self.schedule.chance(0.8):  # else it has to ask
                    self.caller.call(Decide(partition, transaction, commit), lambda _: None)
            if commit:
                self.finish(parts, placed)
            else:
                pause = self.schedule.between(10 * MS, 500 * MS)
                self.after(pause, self.attempt, parts, number + 1)

        for partition, entries in parts:
            self.prepare(Prepare(partition, entries, transaction, home), prepared)

    def prepare(self, request: Prepare, prepared: Callable[[int, Any], None]) -> None:
        self.caller.insist(request, lambda answer, _: prepared(request.partition, answer))

    def finish(self, parts: list[tuple[int, Entries]], placed: dict[int, int]) -> None:
        for partition, entries in parts:
            self.tell_told(entries, partition, placed[partition])
        self.busy = False
        self.later(50, 800)
