"""The whole story: first the queue, then the deltas and their pipeline, on one node."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.demo.chapters import Chapter, Screen, document_of
from penstock.demo.picture.samples import Recording
from penstock.demo.queue.story import tell_of_the_queue
from penstock.model.version import __version__
from penstock.testing.process import ServerProcess, penstock_program, server_process


@dataclass(frozen=True)
class Running:
    """What can be used while the demo stays."""

    addresses: dict[str, str]
    commands: list[str]


Keep = Callable[[dict[str, Any], Running], Awaitable[None]]


@dataclass(kw_only=True)
class Story:
    """One telling. `keep` is called at the end, while everything still runs."""

    folder: Path
    screen: Screen
    queue: bool = True  # the first act
    pipeline: bool = True  # the second act, which needs Spark and Redis
    quick: bool = False
    picture: Path | None = None
    keep: Keep | None = None
    chapters: list[Chapter] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    async def tell(self) -> dict[str, Any]:
        """Play the acts; the document says whether every claim held."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.pipeline:
            async with server_process(self.folder / "queue") as server:
                await self._first_act(server)
                if self.keep is not None:
                    await server.start()
                return await self._end(None, Running(_addresses(server), _queue_commands(server)))
        async with server_process(self.folder / "node") as server:
            return await self._whole(server)

    async def _first_act(self, server: ServerProcess) -> None:
        self.screen.act("Act one: the queue", "Priorities, retries, and kill -9.")
        self.screen.say(f"penstock serve is process {server.pid}, native at {server.url}")
        self.chapters += await tell_of_the_queue(server, self.screen)

    async def _whole(self, server: ServerProcess) -> dict[str, Any]:
        """Spark takes its time to start: the first act is played meanwhile, on its own node."""
        from penstock.demo.archive import story as delta_story
        from penstock.demo.archive.cinema import cinema, watched
        from penstock.demo.archive.pipeline import Scale

        self.screen.act(
            "Prologue: an archive", "A node, Redis and Spark start. Nobody waits for them to write."
        )
        scale = Scale.of(quick=self.quick)
        async with cinema(self.folder, server, self.screen, scale) as house:
            async with watched(house):
                play = await delta_story.begin(house, scale)
                self.chapters += await delta_story.prologue(play)
                if self.queue:
                    with house.aside():
                        async with server_process(self.folder / "queue") as queue:
                            await self._first_act(queue)
                self.screen.act(
                    "Act two: deltas, and a pipeline on Spark",
                    "Writers that disagree, a slow sink, a failing one; and all ends well.",
                )
                self.chapters += await delta_story.second_act(play)
            self.chapters += await delta_story.epilogue(play, stop=self.keep is None)
            addresses = {**_addresses(server), "redis": house.redis.url}
            return await self._end(house.recording, Running(addresses, house.commands()))

    async def _end(self, recording: Recording | None, running: Running) -> dict[str, Any]:
        """The document, the picture, the summary, and the wait of somebody who stays."""
        document = document_of(self.chapters, seconds=time.perf_counter() - self.began)
        document["made"] = _made()
        if recording is not None and self.picture is not None:
            from penstock.demo.picture.page import page

            self.screen.progress("drawing the picture")
            self.picture.write_text(page(document, recording), encoding="utf-8")
            document["picture"] = str(self.picture)
        self.screen.summary(document)
        if self.keep is not None:
            await self.keep(document, running)
        return document


def _addresses(server: ServerProcess) -> dict[str, str]:
    return {"native": server.url, "grpc": server.grpc, "http": server.http}


def _queue_commands(server: ServerProcess) -> list[str]:
    program = penstock_program()
    return [f"{program} --url {server.url} stats", f"{program} --url {server.url} topic list"]


def _made() -> str:
    when = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")
    return (
        f"Made by Penstock {__version__} with Python {platform.python_version()}"
        f" on {os.cpu_count()} cores, {when}."
    )
