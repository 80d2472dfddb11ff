"""Producers and consumers at full speed, `kill -9`, restart, and an account of every message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.demo.chapters import Chapter
from penstock.errors import RetryableError
from penstock.model.batch import Batch, Kind
from penstock.model.ids import LeaseToken
from penstock.testing.process import ServerProcess

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection, DeliveredBatch

TOPIC: Final = "changes"
MESSAGES: Final = 6_000
PRODUCERS: Final = 128
KILL_AT: Final = MESSAGES // 2  # acknowledged puts
HOLD: Final = 25  # messages whose consumer is still at work when the server dies
HOLD_AT: Final = KILL_AT // 2
HOLD_MS: Final = 120_000
VISIBILITY_MS: Final = 2_000
SHAPE: Final = {"name": TOPIC, "partitions": 2, "visibility_ms": VISIBILITY_MS}
CREDITS: Final = 200
DRAIN_S_MAX: Final = 120.0
IDLE_S: Final = 0.05

Place = tuple[int, int]  # partition and sequence: what a message is to the server


class Lease(NamedTuple):
    token: LeaseToken
    place: Place


@dataclass
class ClientLedger:
    """The client's own account: what it put, leased and acknowledged, and what contradicts it.

    Messages are known by the number in their payload.
    `unsure` holds leases whose acknowledgement was not confirmed: the message may or may not be
    done, but while such a lease runs nobody else may get the message.
    """

    visibility_ms: int
    started: set[int] = field(default_factory=set)  # puts begun
    put: set[int] = field(default_factory=set)  # puts acknowledged
    done: set[int] = field(default_factory=set)  # acknowledgements confirmed
    held: dict[int, LeaseToken] = field(default_factory=dict)
    unsure: dict[int, LeaseToken] = field(default_factory=dict)
    leased_at: dict[int, float] = field(default_factory=dict)
    message_of: dict[int, Place] = field(default_factory=dict)
    deliveries: int = 0
    # what must stay empty
    phantoms: set[int] = field(default_factory=set)  # delivered, never put
    doubled: set[int] = field(default_factory=set)  # one put, two messages
    resurrected: set[int] = field(default_factory=set)  # delivered after a confirmed ack
    overlaps: set[int] = field(default_factory=set)  # leased while leased
    redelivered: set[int] = field(default_factory=set)  # after its lease ran out: allowed

    _waiting: list[tuple[int, asyncio.Event]] = field(default_factory=list)

    def acknowledge(self, key: int) -> None:
        """The server said that the put of `key` is durable."""
        self.put.add(key)
        for count, event in self._waiting:
            if len(self.put) >= count:
                event.set()

    async def reached(self, puts: int) -> None:
        """Wait until that many puts are acknowledged."""
        event = asyncio.Event()
        self._waiting.append((puts, event))
        await event.wait()

    def delivered(self, leases: Iterable[tuple[int, Lease]]) -> None:
        now = time.monotonic()
        for key, lease in leases:
            self.deliveries += 1
            if self.message_of.setdefault(key, lease.place) != lease.place:
                self.doubled.add(key)
            if key not in self.started:
                self.phantoms.add(key)
            if key in self.done:
                self.resurrected.add(key)
            if key in self.held or now < self._lease_end(key):
                self.overlaps.add(key)
            elif key in self.leased_at:
                self.redelivered.add(key)
            self.leased_at[key] = now
            self.unsure[key] = lease.token

    def _lease_end(self, key: int) -> float:
        """The earliest moment at which an unconfirmed lease of `key` may have run out."""
        return self.leased_at.get(key, float("-inf")) + self.visibility_ms / 1000

    def hold(self, leases: Sequence[tuple[int, Lease]]) -> None:
        self.delivered(leases)
        for key, lease in leases:
            del self.unsure[key]
            self.held[key] = lease.token

    def settled(self, keys: Iterable[int]) -> None:
        """The server confirmed that these are done."""
        for key in keys:
            self.done.add(key)
            self.unsure.pop(key, None)


async def survive_kill(server: ServerProcess, chapter: Chapter, say: Callable[[str], None]) -> None:
    """Run the load over the crash and state what became of every message."""
    import penstock
    from penstock.client.network.endpoints import open_connection

    ledger = ClientLedger(visibility_ms=VISIBILITY_MS)
    admin = await open_connection(server.url)
    await admin.call("topic_create", config=SHAPE)
    async with penstock.connect(server.url) as client, asyncio.TaskGroup() as group:
        topic = client.topic(TOPIC, of=bytes)
        producers = group.create_task(_produce(topic, ledger))
        consumer = group.create_task(_consume_until_lost(server.url, ledger))
        await ledger.reached(HOLD_AT)
        ledger.hold(await _hold(admin))
        await ledger.reached(KILL_AT)
        under_way = len(ledger.started) - len(ledger.put)
        await server.kill()
        say(f"killed with {under_way} puts under way and {HOLD} leases held; restarting")
        await consumer
        await admin.close()
        recover_s = await server.start()
        say(f"serving again after {recover_s:.1f} s; the producers went on by themselves")
        admin = await open_connection(server.url)
        await _settle_unsure(admin, ledger)
        await _drain(admin, ledger, producers)
        lost = await admin.settle(TOPIC, list(ledger.held.values()))
        ledger.settled(key for i, key in enumerate(ledger.held) if i not in lost)
    await admin.close()
    _state_claims(chapter, ledger, under_way=under_way, lost=len(lost))
    chapter.figures["recover_s"] = round(recover_s, 2)


async def _produce(topic: Any, ledger: ClientLedger) -> None:
    """Put every number once; a put that the crash interrupts is repeated by the SDK."""
    numbers = iter(range(MESSAGES))

    async def producer() -> None:
        for number in numbers:
            ledger.started.add(number)
            await topic.put(b"%d" % number, priority=number % 10)
            ledger.acknowledge(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(PRODUCERS):
            group.create_task(producer())


async def _consume_until_lost(url: str, ledger: ClientLedger) -> None:
    """Lease and acknowledge until the server is gone."""
    from penstock.client.network.endpoints import open_connection

    connection = await open_connection(url)
    try:
        await _consume(connection, ledger)
    except RetryableError:
        await connection.close()  # what was leased and not confirmed stays `unsure`


async def _consume(connection: Connection, ledger: ClientLedger) -> None:
    stream = await connection.lease_stream(TOPIC, credits=CREDITS)
    async for batch in stream:
        await _take(connection, batch, ledger)


async def _take(connection: Connection, batch: DeliveredBatch, ledger: ClientLedger) -> None:
    leases = _leases_of(batch)
    ledger.delivered(leases)
    lost = await connection.settle(TOPIC, [lease.token for _, lease in leases])
    ledger.settled(key for i, (key, _) in enumerate(leases) if i not in lost)


def _leases_of(batch: DeliveredBatch) -> list[tuple[int, Lease]]:
    delivery = batch.delivery
    sequences = batch.columns.fixed("message").tolist()
    return [
        (int(payload), Lease(delivery.token(i), (delivery.partition, sequences[i])))
        for i, payload in enumerate(batch.columns.binary("payload") or ())
    ]


async def _hold(connection: Connection) -> list[tuple[int, Lease]]:
    """Lease some messages for long, as a slow consumer does."""
    held: list[tuple[int, Lease]] = []
    while len(held) < HOLD:
        found = await connection.call(
            "pop", topic=TOPIC, limit=HOLD - len(held), wait_ms=1000, visibility_ms=HOLD_MS
        )
        for m in found["messages"]:
            token = LeaseToken.parse(m["lease_token"])
            held.append((int(m["payload"]), Lease(token, (m["partition"], m["sequence"]))))
    return held


async def _settle_unsure(connection: Connection, ledger: ClientLedger) -> None:
    """Repeat the acknowledgements whose answer the crash swallowed.

    A lost token proves nothing by itself; it counts only if the log holds its acknowledgement.
    """
    unsure = list(ledger.unsure.items())
    lost = set(await connection.settle(TOPIC, [token for _, token in unsure]))
    logged = await _acknowledged_in_log(connection) if lost else set()
    ledger.settled(
        key
        for i, (key, token) in enumerate(unsure)
        if i not in lost or (token.partition, token.sequence) in logged
    )


async def _acknowledged_in_log(connection: Connection) -> set[tuple[int, int]]:
    """Partition and sequence of every lease that a committed entry acknowledges."""
    found: set[tuple[int, int]] = set()
    for end in (await connection.call("log_status", topic=TOPIC))["partitions"]:
        stream = await connection.log_stream(
            TOPIC,
            partition=end["partition"],
            from_sequence=max(1, end["sequence_first"]),
            through=end["sequence_committed"],
        )
        async for batches in stream:
            found.update(place for batch in batches for place in _acknowledged(batch))
    return found


def _acknowledged(batch: Batch) -> Iterator[tuple[int, int]]:
    columns = batch.columns()
    if batch.kind is Kind.ACK and "token" in columns.views:
        for token in columns.fixed("token").tolist():
            yield batch.partition, token


async def _drain(
    connection: Connection, ledger: ClientLedger, producers: asyncio.Task[None]
) -> None:
    """Consume until the producers are done and only the held leases are left.

    Counts in `stats` may be ahead of the answers: an acknowledgement is over when it is confirmed.
    """
    consumer = asyncio.create_task(_consume(connection, ledger))
    try:
        await producers
        deadline = time.monotonic() + DRAIN_S_MAX
        while time.monotonic() < deadline and not consumer.done():
            stats = (await connection.call("stats", topic=TOPIC))["topics"][0]
            left = stats["ready"] + stats["delayed"] + stats["leased"]
            if left == len(ledger.held) and not ledger.unsure:
                break
            await asyncio.sleep(IDLE_S)
    finally:
        consumer.cancel()
        with suppress(asyncio.CancelledError):
            await consumer  # an error of its own must be seen


def _state_claims(chapter: Chapter, ledger: ClientLedger, *, under_way: int, lost: int) -> None:
    missing = ledger.put - ledger.done
    chapter.note(
        f"  {len(ledger.put)} puts acknowledged, {under_way} under way at the kill,"
        f" {len(ledger.redelivered)} leases ran out and were delivered again"
    )
    chapter.claim(
        "every acknowledged message survived", not missing and len(ledger.put) == MESSAGES,
        f"{len(ledger.put & ledger.done)} of {len(ledger.put)} accounted for",
    )  # fmt: skip
    chapter.claim(
        "none was invented or doubled by a retry",
        not ledger.phantoms and not ledger.doubled,
        f"{len(ledger.phantoms)} invented, {len(ledger.doubled)} doubled",
    )
    chapter.claim(
        "none came back after its acknowledgement", not ledger.resurrected,
        f"{len(ledger.resurrected)} came back",
    )  # fmt: skip
    chapter.claim(
        "none was leased twice at a time",
        not ledger.overlaps,
        f"{len(ledger.overlaps)} overlaps in {ledger.deliveries} leases",
    )
    chapter.claim(
        "leases outlive the crash: their holders could still acknowledge", lost == 0,
        f"{len(ledger.held) - lost} of {len(ledger.held)} held leases were valid",
    )  # fmt: skip
    chapter.figures["messages_put_under_load"] = len(ledger.put)
    chapter.figures["puts_under_way_at_kill"] = under_way
