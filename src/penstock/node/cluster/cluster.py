"""The other nodes of this one's cluster: who they are, what they hold, and how to reach them; and
this node's data folder, as the metadata of the cluster know it.

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
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from penstock.cluster.catalog import Catalog
from penstock.cluster.membership import Membership, NodeInfo
from penstock.cluster.placement import Candidate, Plans, Policy, Records
from penstock.cluster.store import LeasingStore, MetadataStore, Versioned, repeat, until_won
from penstock.config import ClusterOptions
from penstock.errors import (
    Corruption,
    FailedPrecondition,
    PenstockError,
    RetryableError,
    Unavailable,
)
from penstock.log.crash import crash_point
from penstock.log.folder import DataFolder
from penstock.log.identity import (
    GENERATION_FILE,
    NO_GENERATION,
    REPLICA_FILE,
    Generation,
    GenerationFile,
    ReplicaFile,
)
from penstock.node.clock import Clock
from penstock.node.cluster.control import ClusterControl, Local
from penstock.node.cluster.transport import Connect, Peers, PeerTransport, SeedReader, SeedServer
from penstock.node.observe.logs import get_logger
from penstock.node.replica.clocks import Clocks, ClockWatch
from penstock.node.replica.host import Host
from penstock.node.replica.ports import Key
from penstock.replication.facts import ReplicationOptions

DISKS: Final = "disks/"
CLUSTER_UUID: Final = "cluster/uuid"
PROBE_S: Final = 2.0  # between looks whether the metadata store answers
LOOK_S: Final = 0.5  # between looks whether the others are reached
ASK_S: Final = 2.0
RESIGNING_MAX: Final = 16  # partitions that are handed over at the same time
T = TypeVar("T")
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
        return 0 if self._file is None else self._file.record.current.number

    async def claim(self, *, accept_rollback: bool) -> None:
        """Make the folder ours. An older one has its replicas renamed before the generation is
        raised: a crash in between finds it as old again."""
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
        if known in (file.record.current, file.record.intended):
            return False
        if known.number >= file.record.current.number:
            return True
        log.warning(
            "the metadata are older than this data folder: was etcd restored from a copy?",
            generation=file.record.current.number, in_metadata=known.number,
        )  # fmt: skip
        return False

    async def _on_rolled_back(
        self, file: GenerationFile, entry: Versioned | None, *, accepted: bool
    ) -> None:
        facts = {"generation": file.record.current.number, "in_metadata": _of(entry).number}
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
        if known == file.record.intended != file.record.current:  # an answer was lost
            await asyncio.to_thread(file.settle, known)
            self._told = None
        if self._told is None:
            highest = max(known.number, file.record.current.number, file.record.intended.number)
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


class Cluster:
    """`start` once this node listens, `leave` before it stops listening."""

    def __init__(
        self,
        node: str,
        *,
        store: LeasingStore,
        catalog: Catalog,
        options: ClusterOptions,
        replication: ReplicationOptions,
        connect: Connect,
        local: Local,
        disk: DataDisk,
        clock: Clock,
        spawn: Callable[..., object],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.node, self.options, self.policy = node, options, Policy(options.policy)
        self.catalog, self.records = catalog, Records(store)
        self.plans, self.store = Plans(store), store
        self.disk, self._on_fatal, self._local = disk, on_fatal, local
        self.members = Membership(
            store, lease_ttl_s=options.lease_s, before_return=self._renew_disk,
            on_change=self._on_members,
        )  # fmt: skip
        self.peers = Peers(
            node, connect=connect, spawn=spawn, on_connected=self._on_connected,
            on_refused=lambda node: self.transport.on_refused(node),
        )  # fmt: skip
        self.clocks = Clocks(node, tolerance_ms=options.clock_offset_s * 1000)
        self._watch = ClockWatch(
            self.clocks, clock, ask=self.ask, reached=self._reached, members=lambda: self.alive,
            hand_over=self._give_up_all,
        )  # fmt: skip
        self._uuid = ""  # of its metadata; known once this node has joined
        self.available = True  # the metadata store answered when it was asked last
        self.ready = False  # topics and records were read: requests may come
        self.leaving = False
        self.alone = False
        self.cut_off = False  # neither the metadata store nor a majority of the members is reached
        self._spawn = spawn
        self._membership: asyncio.Task[Any] | None = None
        reader = SeedReader(self.peers, bytes_per_s=replication.seed_bytes_per_s)
        self.seeds = SeedServer(local.hosts)
        self.transport = PeerTransport(
            self.node, peers=self.peers, hosts=local.hosts, fetch_seed=reader.fetch
        )
        self.control = ClusterControl(
            self.node, store=store, records=self.records, catalog=catalog, local=local,
            ages=lambda: self.members.ages, deleted=self.deleted, spawn=spawn,
        )  # fmt: skip
        self.live, self.changed = self.peers.live, self.control.changed
        self.close, self.set_draining = self.peers.close, self.members.set_draining

    # --- the view that requests are routed by ---

    def coordinator(self, key: Key) -> str:
        """The node that coordinates a partition, if it can be asked."""
        node = self.control.coordinator(key)
        return node if node == self.node or self.live(node) is not None else ""

    def _on_connected(self, node: str) -> None:
        self.transport.on_connected(node)
        self.control.wake()  # who waits for a coordinator may find it reachable now
        self._watch.wake()

    # --- asking other nodes ---

    async def ask(
        self, node: str, method: str, /, *, within_s: float = ASK_S, **arguments: Any
    ) -> dict[str, Any]:
        if node == self.node:
            return await self._local.call(method, arguments)
        connection = self.live(node)
        if connection is None:
            raise Unavailable(f"node {node} is not connected", node=node)
        try:
            async with asyncio.timeout(within_s):
                return await connection.call(method, **arguments)
        except TimeoutError as error:
            raise Unavailable(f"node {node} did not answer in {within_s:g} s", node=node) from error

    async def ask_all(
        self, method: str, /, *, within_s: float = ASK_S, **arguments: Any
    ) -> dict[str, dict[str, Any]]:
        """An administrative call to every member; those who do not answer are left out."""
        nodes = sorted({*self.alive, self.node})
        answers = await asyncio.gather(
            *(self.ask(node, method, within_s=within_s, **arguments) for node in nodes),
            return_exceptions=True,
        )
        told: dict[str, dict[str, Any]] = {}
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, dict):
                told[node] = answer
            elif not isinstance(answer, PenstockError):
                raise answer
        return told

    # --- who is there ---

    @property
    def alive(self) -> Mapping[str, NodeInfo]:
        return self.members.alive

    @property
    def ages(self) -> Mapping[str, int]:
        return self.members.ages

    @property
    def rolled_back(self) -> bool:
        """Whether the folder is an older copy of itself, and some replica in it does not count."""
        if not self.disk.rolled_back:
            return False
        records, hosts = self.control.records, self._local.hosts
        ours = [key for key, held in records.items() if held.record.is_voter(self.node)]
        return not all(key in hosts and hosts[key].replica.counts for key in ours)

    @property
    def is_oldest(self) -> bool:
        """Whether this node looks after what one node is enough for."""
        return self.node == min(self.ages, key=lambda node: self.ages[node], default="")

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(info.id, info.zone, self.ages.get(info.id, 0), info.draining)
            for info in self.alive.values()
        ]

    def _on_members(self) -> None:
        self.peers.on_members(self.alive)
        self.control.on_members(self.ages)

    # --- coming and going ---

    async def open(self) -> None:
        """Nothing is held before this node has joined (`start`)."""

    async def start(self, info: NodeInfo, *, uuid: str) -> None:
        """Join, and take part from now on. Raises `AlreadyExists` if another node has our name.
        `uuid` is of the metadata that the data folder is from."""
        self._uuid = uuid
        await until_available(lambda: self.members.join(info))
        self._on_members()
        self._spawn(self._stay(), name="members", vital=True)
        self._spawn(self.control.run(), name="control", vital=True)
        self._spawn(self._look_around(), name="reach", vital=True)
        for name, work, trouble in (
            ("metadata-probe", self._probe, "the metadata cannot be read"),
            ("clocks", self._watch.run, "clocks are not compared"),
            ("disk", self._keep_disk, "the disk is not renewed"),
        ):
            repeating = repeat(work, trouble=trouble, pause_s=PROBE_S)
            self._spawn(repeating, name=name, vital=True)
        await self.control.ready()
        self.ready = True
        log.info("joined", cluster=self.options.name, node=self.node, nodes=sorted(self.alive))

    async def _stay(self) -> None:
        self._membership = asyncio.current_task()
        await self.members.run()

    async def _keep_disk(self) -> None:
        await asyncio.sleep(self.options.generation_s)
        await self._renew_disk()

    async def _renew_disk(self) -> None:
        """Raise the generation of the data folder; end the node if that is not its own any more."""
        try:
            await self.disk.renew()
        except FailedPrecondition as error:
            self._on_fatal(error)
            raise

    async def leave(self, within_s: float) -> None:
        """Hand all partitions over, bounded in time, and tell the others that we go. Without time,
        as after a failure, nothing is handed over: the others take it when they hear of it."""
        self.leaving = True
        deadline = time.monotonic() + within_s
        if self.members.joined and within_s > 0:
            await self._leave_in_order(within_s)
        if self._membership is not None:
            self._membership.cancel()  # it would register us again
        if self.members.joined:
            try:
                async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
                    await self.members.leave()
            except (TimeoutError, PenstockError) as error:
                log.warning("left without a word; the lease ends by itself", error=str(error))

    async def _leave_in_order(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self.set_draining(True)
                await self._hand_over()
                await self.disk.renew()  # a copy that was taken while we ran is older now
        except (TimeoutError, PenstockError) as error:
            log.warning(
                "not everything was handed over",
                error=str(error) or "no time left",
                partitions=len(self._coordinated()),
            )

    async def _hand_over(self) -> None:
        """Give up what others can take over, and wait until they have."""

        async def hand_over(key: Key) -> None:
            await self.resign(key)
            while self.control.coordinator(key) == self.node and self._has_heir(key):
                with suppress(TimeoutError):  # an heir that goes away changes no record
                    async with asyncio.timeout(LOOK_S):
                        await self.control.changed(key)

        await _some_at_a_time(hand_over, filter(self._has_heir, self._coordinated()))
        left = len(self._coordinated())
        if left:
            log.info("partitions that nobody else can take over now stop", partitions=left)

    def _coordinated(self) -> list[Key]:
        records = self.control.records.items()
        return [key for key, held in records if held.record.coordinator == self.node]

    def _has_heir(self, key: Key) -> bool:
        """Whether a majority of the replicas is reached without us, and one of them is to stay."""
        record = self.control.records[key].record
        others = [n for n in self._reached() if record.is_voter(n)]
        return record.majority(others) and any(not self.alive[n].draining for n in others)

    async def resign(self, key: Key) -> None:
        """Give a partition up, and do not try to get it back while we leave."""
        host = self._local.hosts.get(key)
        if host is None:
            return
        await host.resign()
        if self.leaving:
            self.control.quiet.add(key)

    async def _give_up_all(self) -> bool:
        """Give up what is coordinated here, to whoever takes it; whether nothing is left."""
        hosts = [host for host in self._local.hosts.values() if host.coordinates]
        await _some_at_a_time(Host.resign, hosts)
        return not any(host.coordinates for host in hosts)

    def _reached(self) -> list[str]:
        return [node for node in self.alive if self.live(node) is not None]

    async def deleted(self, topic: int) -> bool:
        """Whether a topic was deleted: our metadata, as we joined with them, gave out its id."""
        return await self.catalog.given(topic) and await self._same()

    async def protect_ids(self) -> None:
        """Have no topic given an id that a folder here has: a restored store does not know it."""
        skipped = await self.catalog.skip_ids(self._local.topic_id_highest())
        if skipped:
            log.critical(
                "the metadata are older than folders here, and lack topics that these have; their "
                "files are kept, and their ids are not given out again",
                skipped=skipped,
            )

    async def _same(self) -> bool:
        entry = await self.store.get(CLUSTER_UUID)
        return entry is not None and entry.value.decode() == self._uuid

    async def _look_around(self) -> None:
        """Know whether this node is cut off. Then others have taken over what it coordinates, or
        soon will, and whoever can reach them should."""
        while True:
            # A majority of those who were alive when we last heard.
            among_most = 2 * (1 + len(self._reached())) > len(self.alive)
            cut_off = self.ready and not (self.available or among_most)
            if cut_off and not self.cut_off:
                log.warning("cut off from the other nodes and the metadata store")
            elif self.cut_off and not cut_off:
                log.info("no longer cut off")
            self.cut_off = cut_off
            if cut_off:
                self._local.on_cut_off()
            await asyncio.sleep(LOOK_S)

    async def _probe(self) -> None:
        try:
            reached = await self._same()
            if reached:
                await self.protect_ids()
            if not reached and self.available:
                log.critical("the metadata of this cluster are gone: restore etcd")
        except PenstockError as error:
            reached = False
            if self.available:
                log.warning("the metadata store is away; this node goes on", error=str(error))
        if reached and not self.available:
            log.info("the metadata store is back")
        self.available = reached
        await asyncio.sleep(PROBE_S)


async def _some_at_a_time(resign: Callable[[T], Awaitable[None]], given_up: Iterable[T]) -> None:
    turns = asyncio.Semaphore(RESIGNING_MAX)

    async def in_turn(each: T) -> None:
        async with turns:
            await resign(each)

    async with asyncio.TaskGroup() as tasks:
        for each in given_up:
            tasks.create_task(in_turn(each))


async def until_available(join: Callable[[], Awaitable[None]]) -> None:
    """For a node that starts: it waits for a store that is away, and ends if it is refused."""
    while True:
        try:
            await join()
            return
        except RetryableError as error:
            log.warning("waiting for the metadata store", error=error.message)
            await asyncio.sleep(PROBE_S)
