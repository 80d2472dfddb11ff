"""What goes wrong, when, and when it is put right again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from verification.simulation.node import SCRUB_US, Node
from verification.simulation.schedule import MS, SECOND

if TYPE_CHECKING:
    from verification.simulation.simulation import Simulation

FUSE_POINTS: Final = 120
RARE_POINTS: Final = (
    "persist.asked", "persist.done", "fence.answered", "truncate.asked", "truncate.done",
    "barrier.staged", "serving.began", "serving.ended", "epoch.asked", "epoch.taken",
    "change.asked", "change.done", "snapshot.asked", "seed.dropped", "seed.stored",
    "prepare.staged", "decide.staged", "expire.staged", "renew.asked", "renew.disowned",
    "renew.done",
)  # fmt: skip


class Faults:
    """Draws faults until the end, and remembers how to mend what is not mended yet."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._schedule = simulation, simulation.schedule
        weights = simulation.profile.faults
        self._names, self._weights = list(weights), list(weights.values())
        self._mends: dict[int, Callable[[], None]] = {}
        self._number = 0
        self.drawn: dict[str, int] = {}

    # --- the run ---

    def start(self) -> None:
        low, high = self._simulation.profile.pause_ms
        self._schedule.after(self._schedule.skewed(low * MS, high * MS), self._draw)

    def _draw(self) -> None:
        if self._simulation.calm:
            return
        name = self._schedule.rng.choices(self._names, self._weights)[0]
        self.drawn[name] = self.drawn.get(name, 0) + 1
        self._simulation.log("fault", name)
        getattr(self, f"_{name}")()
        self.start()

    def mend_all(self) -> None:
        """No more faults: everything comes back."""
        mends, self._mends = list(self._mends.values()), {}
        for mend in mends:
            mend()
        for node in self._simulation.nodes.values():
            node.fuse = node.trap = None
            node.resume()
            for host in node.hosts.values():
                host.disk.fail_next = False
            self._schedule.after(self._schedule.between(0, 300 * MS), node.boot)

    def _for_a_while(self, low: int, high: int, mend: Callable[[], None]) -> None:
        self._number += 1
        number = self._number

        def over() -> None:
            if self._mends.pop(number, None) is not None:
                mend()

        self._mends[number] = mend
        self._schedule.after(self._schedule.skewed(low, high), over)

    def on_stopped(self, node: Node) -> None:
        """Somebody starts it again, sooner or later."""
        low, high = (10, 200) if self._simulation.calm else self._simulation.profile.down_ms
        self._schedule.after(self._schedule.skewed(low * MS, high * MS), node.boot)

    def _some_node(self) -> Node:
        simulation = self._simulation
        return simulation.nodes[self._schedule.rng.choice(simulation.names)]

    # --- processes ---

    def _crash(self) -> None:
        self._some_node().crash("killed", power=self._schedule.chance(0.3))

    def _fuse(self) -> None:
        """A process ends at a named point: one that is drawn, or whichever is the n-th from now."""
        node = self._some_node()
        if self._schedule.chance(0.5):
            node.trap = self._schedule.rng.choice(RARE_POINTS)
        else:
            node.fuse = self._schedule.skewed(1, FUSE_POINTS)

    def _power_loss(self) -> None:
        for node in self._simulation.nodes.values():
            node.crash("power", power=True)

    def _pause(self) -> None:
        node = self._some_node()
        life = node.life
        node.pause()
        self._for_a_while(
            50 * MS, 5 * SECOND, lambda: node.resume() if node.life == life else None
        )  # fmt: skip

    def _restart(self) -> None:
        """In good order: give up all epochs, leave, stop; then come back."""
        node = self._some_node()
        self._resign_all(node)
        self._simulation.store.leave(node.name)
        life = node.life
        self._schedule.after(
            self._schedule.between(10 * MS, 300 * MS),
            lambda: node.crash("stopped") if node.life == life else None,
        )

    def _clock_jump(self) -> None:
        """The wall clock is set; a process that runs goes by the monotonic one."""
        node = self._some_node()
        node.wall_ms += self._schedule.between(-3_600_000, 3_600_000)

    # --- network ---

    def _cut(self) -> None:
        """One way only."""
        one, other = self._schedule.rng.sample(self._simulation.names, 2)
        self._cut_links([(one, other)])

    def _strand(self) -> None:
        """A coordinator loses the other nodes, one way or both, and still hears its clients."""
        simulation, store = self._simulation, self._simulation.store
        partition = self._schedule.between(0, simulation.profile.partitions - 1)
        name = store.records[partition][0].coordinator or simulation.names[0]
        others = [n for n in simulation.names if n != name]
        out, back = [(name, n) for n in others], [(n, name) for n in others]
        links = self._schedule.rng.choice([out, back, out + back, out + back])
        if self._schedule.chance(0.5):
            store.cut_off(name)
            self._cut_links(links, lambda: store.reconnect(name), least_us=800 * MS)
        else:
            self._cut_links(links, least_us=800 * MS)

    def _isolate(self) -> None:
        """From everybody, perhaps from the metadata store too."""
        name, store = self._some_node().name, self._simulation.store
        others = [n for n in (*self._simulation.names, *self._simulation.clients) if n != name]
        links = [(name, n) for n in others] + [(n, name) for n in others]
        if self._schedule.chance(0.5):
            store.cut_off(name)
            self._cut_links(links, lambda: store.reconnect(name))
        else:
            self._cut_links(links)

    def _cut_links(
        self,
        links: list[tuple[str, str]],
        also: Callable[[], None] = lambda: None,
        *,
        least_us: int = 100 * MS,
    ) -> None:
        cut = self._simulation.network.cut
        for link in links:
            cut[link] = cut.get(link, 0) + 1

        def mend() -> None:
            for link in links:
                cut[link] -= 1
            also()

        self._for_a_while(least_us, 5 * SECOND, mend)

    def _reset_stream(self) -> None:
        network = self._simulation.network
        streams = [s for s in network.streams.values() if not s.broken]
        if streams:
            network.break_stream(self._schedule.rng.choice(streams))

    # --- metadata ---

    def _cut_store(self) -> None:
        name, store = self._some_node().name, self._simulation.store
        store.cut_off(name)
        self._for_a_while(200 * MS, 6 * SECOND, lambda: store.reconnect(name))

    def _store_away(self) -> None:
        store = self._simulation.store
        store.away = True
        self._for_a_while(200 * MS, 4 * SECOND, store.come_back)

    def _stale_watch(self) -> None:
        lag_us = self._schedule.skewed(300 * MS, 5 * SECOND)
        self._simulation.store.lag(self._some_node().name, lag_us)

    def _retarget(self) -> None:
        """An operator wants the replicas elsewhere."""
        simulation = self._simulation
        partition = self._schedule.between(0, simulation.profile.partitions - 1)
        factor = simulation.profile.replication_factor
        target = tuple(self._schedule.rng.sample(simulation.names, factor))
        if not simulation.store.away:
            simulation.store.edit(partition, target=target)

    def _resign(self) -> None:
        self._resign_all(self._some_node())

    def _resign_all(self, node: Node) -> None:
        for host in list(node.hosts.values()):
            if host.tenure is not None and host.tenure.serving:
                node.run(host.resign)

    # --- disks ---

    def _slow_disk(self) -> None:
        node = self._some_node()

        def set_slow(slow: bool) -> None:
            node.slow_disk = slow
            for host in node.hosts.values():
                host.disk.slow = slow

        set_slow(True)
        self._for_a_while(200 * MS, 4 * SECOND, lambda: set_slow(False))

    def _disk_full(self) -> None:
        disks = [host.disk for host in self._some_node().hosts.values()]

        def set_full(full: bool) -> None:
            for disk in disks:
                disk.full = full

        set_full(True)
        self._for_a_while(100 * MS, 3 * SECOND, lambda: set_full(False))

    def _failed_sync(self) -> None:
        hosts = list(self._some_node().hosts.values())
        if hosts:
            self._schedule.rng.choice(hosts).disk.fail_next = True

    def _rot(self) -> None:
        node = self._some_node()
        partitions = [p for p in node.platters if self._may_lose(node, p)]
        if not partitions:
            return
        partition = self._schedule.rng.choice(partitions)
        platter = node.platters[partition]
        if platter.batches and self._schedule.chance(0.75):
            platter.bad = self._schedule.rng.choice(platter.batches).last
            node.after(self._schedule.skewed(*SCRUB_US), node.scrub, partition)
        else:
            platter.rotten = True
            node.crash("rot")

    def _wipe(self) -> None:
        node = self._some_node()
        if all(self._may_lose(node, p) for p in node.platters):
            node.crash("wiped", power=True)
            node.wipe()

    def _may_lose(self, node: Node, partition: int) -> bool:
        """Whether the copy on this node can be lost while every other one that counts is good.

        More than a minority lost at once is beyond what replication promises.
        """
        simulation = self._simulation
        if simulation.profile.replication_factor < 3:
            return False
        record, _ = simulation.store.records[partition]
        for name in (*record.voters, *record.joint):
            platter = simulation.nodes[name].platters.get(partition)
            if name == node.name:
                continue
            if platter is None or platter.damaged or record.uuids.get(name) != platter.uuid:
                return False
            host = simulation.nodes[name].hosts.get(partition)
            if host is not None and host.mending.damage:
                return False  # it is about to give its copy up
        return True
