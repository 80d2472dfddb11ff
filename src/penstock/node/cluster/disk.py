"""This node's data folder, as the metadata of its cluster know it.

    disks/<uuid of the folder>  a `DiskEntry`, JSON

What a node has acknowledged is on its disk, and the others count on that. A folder that was
restored from an older copy has forgotten some of it and does not know. So each folder has a
generation, on disk and in the metadata, that is raised at every start, at every clean stop, and now
and then in between. A folder whose generation the metadata have left behind is taken for what it
is: each of its replicas gets another uuid. It copies from the others what it lacks, as a wiped disk
does, and counts for nothing until it has all of it.

The same raising finds two nodes that run on copies of one folder: whoever comes later has raised
the generation, and the other one, which finds that it is not its own any more, stops.

What is not found: a copy that was taken and put back between two raises.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

import msgspec

from penstock.cluster.store import MetadataStore, Versioned, until_won
from penstock.errors import Corruption, FailedPrecondition
from penstock.log.crash import crash_point
from penstock.log.files import Generation
from penstock.log.folder import DataFolder
from penstock.log.identity import (
    GENERATION_FILE,
    NO_GENERATION,
    REPLICA_FILE,
    GenerationFile,
    ReplicaFile,
)
from penstock.node.observe.logs import get_logger

DISKS: Final = "disks/"
log = get_logger(__name__)


class DiskEntry(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    generation: int
    token: str


class DataDisk:
    """`claim` before anything of the folder is used, `renew` from then on."""

    def __init__(self, folder: DataFolder, *, uuid: str, node: str, store: MetadataStore) -> None:
        self._folder, self._node, self._store = folder, node, store
        self._key = f"{DISKS}{uuid}"
        self._file: GenerationFile | None = None
        self._raising = asyncio.Lock()
        # Told to the metadata, and not answered yet. It is told again rather than another one: what
        # was taken for lost may arrive later, and must not look like somebody else's.
        self._told: Generation | None = None
        self.rolled_back = False  # as it was found when it was claimed

    @property
    def generation(self) -> int:
        return 0 if self._file is None else self._file.current.number

    async def claim(self, *, accept_rollback: bool) -> None:
        """Find out whether the folder is the one that was here last, and make it ours.

        A folder that is older has its replicas renamed before the generation is raised: a crash in
        between finds it as old again.
        """
        async with self._raising:
            file = self._file = await asyncio.to_thread(self._open)

            async def claim() -> None:
                entry = await self._store.get(self._key)
                if self._is_behind(file, entry):
                    await self._on_rolled_back(file, entry, accepted=accept_rollback)
                await self._raise(file, entry)

            await until_won(claim)

    async def renew(self) -> None:
        """Raise the generation. Raises `FailedPrecondition` if somebody else has."""
        async with self._raising:
            file = self._file
            if file is None:
                return

            async def renew() -> None:
                entry = await self._store.get(self._key)
                if self._is_behind(file, entry):
                    raise FailedPrecondition(
                        f"another node runs on a copy of {self._folder.path}: "
                        f"it is at generation {_of(entry).number}, this one at {self.generation}"
                    )
                await self._raise(file, entry)

            await until_won(renew)

    def _open(self) -> GenerationFile:
        try:
            return GenerationFile(self._folder.path)
        except Corruption as error:
            log.error("the generation of the data folder is not known", error=error.message)
            (self._folder.path / GENERATION_FILE).unlink()
            return GenerationFile(self._folder.path)

    def _is_behind(self, file: GenerationFile, entry: Versioned | None) -> bool:
        """Whether the metadata know of a later state of this folder."""
        known = _of(entry)
        if known in (file.current, file.intended):
            return False
        if known.number >= file.current.number:
            return True
        log.warning(
            "the metadata are older than this data folder: was etcd restored from a copy?",
            generation=file.current.number, in_metadata=known.number,
        )  # fmt: skip
        return False

    async def _on_rolled_back(
        self, file: GenerationFile, entry: Versioned | None, *, accepted: bool
    ) -> None:
        facts = {"generation": file.current.number, "in_metadata": _of(entry).number}
        if accepted:
            log.critical("an older copy of the data folder is accepted as it is", **facts)
            return
        self.rolled_back = True
        renamed = await asyncio.to_thread(rename_replicas, self._folder)
        log.critical(
            "the data folder is an older copy of itself: its replicas count no more, "
            "and copy from the others what they lack",
            replicas=renamed, **facts,
        )  # fmt: skip

    async def _raise(self, file: GenerationFile, entry: Versioned | None) -> None:
        known = _of(entry)
        if known == file.intended != file.current:  # the answer to an earlier raise was lost
            await asyncio.to_thread(file.settle, known)
            self._told = None
        if self._told is None:
            highest = max(known.number, file.current.number, file.intended.number)
            self._told = Generation(highest + 1, secrets.token_hex(16))
        wanted = self._told
        await asyncio.to_thread(file.intend, wanted)
        crash_point("node.disk.intended")
        value = DiskEntry(node=self._node, generation=wanted.number, token=wanted.token)
        await self._store.put(
            self._key, msgspec.json.encode(value), expected_revision=entry.revision if entry else 0
        )
        crash_point("node.disk.told")
        await asyncio.to_thread(file.settle, wanted)
        self._told = None


def rename_replicas(folder: DataFolder) -> int:
    """Give every replica in the folder another uuid; how many there are."""
    count = 0
    for _, _, path in folder.partitions():
        if not (path / REPLICA_FILE).exists():
            continue  # whoever opens it makes a new one
        try:
            ReplicaFile(path).rename()
        except Corruption as error:  # whoever opens it starts over, under a new uuid
            log.warning("a replica is damaged besides", folder=str(path), error=error.message)
        count += 1
    return count


def _of(entry: Versioned | None) -> Generation:
    if entry is None:
        return NO_GENERATION
    value = msgspec.json.decode(entry.value, type=DiskEntry)
    return Generation(value.generation, value.token)
