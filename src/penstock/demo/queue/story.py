"""The first act, the queue: a person's edit must not wait for bulk work, nor a crash lose it.

Each chapter works on a real server over the wire and states what it saw as claims.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.demo.chapters import Chapter, Screen
from penstock.demo.queue.crash import survive_kill
from penstock.model.ids import LeaseToken
from penstock.testing.process import ServerProcess

if TYPE_CHECKING:
    from penstock.client.network.connection import Connection
    from penstock.log.verify import Report

TOPIC: Final = "embeddings"
MAX_RETRIES: Final = 2
SHAPE: Final[dict[str, Any]] = {
    "name": TOPIC, "mode": "min", "partitions": 4, "k": 1, "max_retries": MAX_RETRIES,
    "backoff_ms_base": 100, "backoff_ms_cap": 400,
}  # fmt: skip
# priority, what happens; enqueued in this order, on purpose the wrong one
CHANGES: Final = (
    (9, "re-embed the winter catalogue"),
    (9, "re-embed the archive"),
    (5, "price list from the supplier"),
    (9, "re-embed all reviews"),
    (0, "editor fixed a wrong product title"),
    (5, "new photos of 40 products"),
    (0, "customer deleted a review"),
    (2, "stock is back for a best seller"),
)
POISON: Final = "vector of the wrong dimension"
FLAKY: Final = "model server was restarting"


@dataclass
class Stage:
    """What every chapter has at hand."""

    server: ServerProcess
    connection: Connection
    screen: Screen

    async def reconnect(self) -> None:
        from penstock.client.network.endpoints import open_connection

        await self.connection.close()
        self.connection = await open_connection(self.server.url)


async def tell_of_the_queue(server: ServerProcess, screen: Screen) -> list[Chapter]:
    """Play the act on a node that has just started; it is stopped at the end."""
    from penstock.client.network.endpoints import open_connection

    stage = Stage(server, await open_connection(server.url), screen)
    chapters = []
    for title, act in (
        ("Priority decides", pop_by_priority),
        ("Failures come back, then go to the dead letters", fail_and_retry),
        ("kill -9 under load", crash_under_load),
        ("Replay of the dead letters", replay_dead_letters),
        ("Proof on the folder itself", prove_folder),
    ):
        chapter = Chapter(title)
        await act(stage, chapter)
        screen.chapter(chapter)
        chapters.append(chapter)
    return chapters


async def pop_by_priority(stage: Stage, chapter: Chapter) -> None:
    await stage.connection.call("topic_create", config=SHAPE)
    await put(stage, CHANGES)
    order = []
    for _ in CHANGES:
        message = (await pop(stage, limit=1))[0]
        await settle(stage, [message])
        order.append((message["priority"], message["payload"].decode()))
        chapter.note(f"  {message['priority']}  {message['payload'].decode()}")
    sorted_by_priority = sorted(CHANGES, key=lambda change: change[0])
    chapter.claim(
        "messages leave by priority, over 4 partitions",
        [p for p, _ in order] == [p for p, _ in sorted_by_priority],
        f"{len(order)} popped in order {[p for p, _ in order]}",
    )
    chapter.claim(
        "each leaves once", sorted(order) == sorted(CHANGES), f"{len(set(order))} distinct"
    )


async def fail_and_retry(stage: Stage, chapter: Chapter) -> None:
    """One message fails once, one fails always; the first succeeds, the second is dead-lettered."""
    await put(stage, [(0, FLAKY), (0, POISON)])
    attempts: dict[str, list[int]] = {FLAKY: [], POISON: []}
    began = time.perf_counter()
    while len(attempts[FLAKY]) < 2 or len(attempts[POISON]) <= MAX_RETRIES:
        for message in await pop(stage, limit=1, wait_ms=5000):
            text = message["payload"].decode()
            attempts[text].append(message["attempts"])
            if text == FLAKY and message["attempts"]:
                await settle(stage, [message])
            else:
                await stage.connection.give_back(TOPIC, tokens_of([message]), reason=text)
    chapter.note(f"  {FLAKY!r} was tried {len(attempts[FLAKY])} times")
    chapter.note(f"  {POISON!r} was tried {len(attempts[POISON])} times")
    dead = (await stage.connection.call("dlq_list", topic=TOPIC))["messages"]
    took = time.perf_counter() - began
    chapter.claim(
        "a failed message comes back after a backoff", attempts[FLAKY] == [0, 1],
        f"attempts {attempts[FLAKY]}",
    )  # fmt: skip
    chapter.claim(
        f"past {MAX_RETRIES} retries it is a dead letter",
        attempts[POISON] == list(range(MAX_RETRIES + 1))
        and [m["payload"].decode() for m in dead] == [POISON],
        f"attempts {attempts[POISON]}, dead after {took:.1f} s, reason {dead[0]['reason']}"
        if dead
        else "the dead letters are empty",
    )


async def crash_under_load(stage: Stage, chapter: Chapter) -> None:
    await survive_kill(stage.server, chapter, stage.screen.say)
    await stage.reconnect()
    dead = (await stage.connection.call("dlq_list", topic=TOPIC))["messages"]
    chapter.claim("dead letters survive too", len(dead) == 1, f"{len(dead)} there after restart")


async def replay_dead_letters(stage: Stage, chapter: Chapter) -> None:
    replayed = (await stage.connection.call("dlq_replay", topic=TOPIC))["replayed"]
    messages = await pop(stage, limit=10, wait_ms=5000)
    await settle(stage, messages)
    left = (await stage.connection.call("dlq_list", topic=TOPIC))["messages"]
    texts = [message["payload"].decode() for message in messages]
    chapter.note(f"  {replayed} replayed, and this time {texts} succeeds")
    chapter.claim(
        "a replayed dead letter is delivered again from attempt 0",
        replayed == 1 and texts == [POISON] and messages[0]["attempts"] == 0 and not left,
        f"{replayed} replayed, {len(left)} dead left",
    )


async def prove_folder(stage: Stage, chapter: Chapter) -> None:
    stats = await stage.connection.call("stats")
    left = {t["name"]: t["ready"] + t["delayed"] + t["leased"] + t["dead"] for t in stats["topics"]}
    chapter.claim("nothing is left over", not any(left.values()), f"{left}")
    await stage.connection.close()
    code = await stage.server.stop()
    chapter.claim("SIGTERM ends the server cleanly", code == 0, f"exit code {code}")
    await verify_folder_at_rest(stage.server.data, chapter)


async def verify_folder_at_rest(data: Path, chapter: Chapter) -> None:
    """The folder is verified whole, and a copy with one flipped bit is found out."""
    from penstock.log.verify import verify_folder

    report = await asyncio.to_thread(verify_folder, data)
    chapter.figures["messages_in_the_log"] = report.messages
    chapter.claim(
        "fsck: gapless, every CRC and the hash chain hold", report.ok,
        f"{report.partitions} partitions, {report.messages} messages",
    )  # fmt: skip
    bad = (await asyncio.to_thread(_flip_and_verify, data)).first_bad
    chapter.claim(
        "fsck finds one flipped bit in a copy", bad is not None,
        f"at sequence {bad['sequence']} of partition {bad['partition']}" if bad else "not found",
    )  # fmt: skip


def _flip_and_verify(data: Path) -> Report:
    """Flip the lowest bit in the middle of the longest stretch of data, in a copy."""
    from penstock.log.verify import verify_folder

    with tempfile.TemporaryDirectory(prefix="penstock-flip-") as scratch:
        copy = Path(scratch) / "data"
        shutil.copytree(data, copy, ignore=shutil.ignore_patterns("LOCK"))
        victim = max(copy.rglob("*.seg"), key=lambda path: path.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(bytes(content).rstrip(b"\0")) // 2] ^= 1
        victim.write_bytes(content)
        return verify_folder(copy)


async def put(stage: Stage, changes: Iterable[tuple[int, str]]) -> None:
    """Enqueue texts with their priorities, one after the other."""
    import penstock

    async with penstock.connect(stage.server.url) as client:
        topic = client.topic(TOPIC, of=bytes, create=False)
        for priority, text in changes:
            await topic.put(text.encode(), priority=priority)


async def pop(stage: Stage, **asked: Any) -> list[dict[str, Any]]:
    found = await stage.connection.call("pop", topic=TOPIC, **asked)
    messages: list[dict[str, Any]] = found["messages"]
    return messages


async def settle(stage: Stage, messages: list[dict[str, Any]]) -> None:
    await stage.connection.settle(TOPIC, tokens_of(messages))


def tokens_of(messages: list[dict[str, Any]]) -> list[LeaseToken]:
    return [LeaseToken.parse(message["lease_token"]) for message in messages]
