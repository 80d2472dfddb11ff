"""The simulator's drivers: a mistake of theirs looks like one of the cores."""

from dataclasses import replace

import msgspec

from penstock.replication.assignment import PartitionRecord
from penstock.replication.effects import Follow, Persist
from penstock.replication.replica import Role
from verification.simulation.network import Stream
from verification.simulation.node import Node
from verification.simulation.profiles import PROFILES, Profile
from verification.simulation.schedule import SECOND
from verification.simulation.simulation import Simulation

QUIET = replace(PROFILES["calm"], name="quiet", partitions=1, atomics=0, consumers=0, faults={})


def running(profile: Profile = QUIET) -> Simulation:
    simulation = Simulation(0, profile)
    simulation.serial = True
    simulation.start()
    simulation.schedule.run_until(2 * SECOND)
    return simulation


def follower_of(simulation: Simulation) -> tuple[Node, PartitionRecord, int]:
    record, revision = simulation.store.records[0]
    name = next(name for name in record.voters if name != record.coordinator)
    return simulation.nodes[name], record, revision


def test_a_late_copy_of_a_follow_does_not_take_the_place_of_the_open_stream() -> None:
    simulation = running()
    follower, record, _ = follower_of(simulation)
    coordinator = simulation.nodes[record.coordinator]
    old = Stream(follower, coordinator, 0, number=1)
    uuid = follower.platters[0].uuid
    late = Follow(follower.name, uuid, record.epoch - 1, old.number, 0, [], 1000, 1 << 20)
    coordinator.on_follow(0, late, old)  # refused: the epoch is over
    coordinator.on_follower_lost(old)
    simulation.heal()
    assert simulation.verdict().problems == []


def test_two_records_without_a_node_retire_it_once() -> None:
    simulation = running()
    node, record, revision = follower_of(simulation)
    host = node.hosts[0]
    gone = msgspec.structs.replace(record, voters=(record.coordinator,))
    host.perform([Persist(record.epoch)])  # what follows waits for it
    simulation.store.records[0] = (gone, revision + 2)
    host.on_record(gone, revision + 1)
    host.on_record(gone, revision + 2)
    simulation.schedule.run_until(3 * SECOND)
    assert 0 not in node.hosts and 0 not in node.platters


def test_a_copy_that_is_given_back_in_time_is_kept() -> None:
    simulation = running()
    node, record, revision = follower_of(simulation)
    host = node.hosts[0]
    host.perform([Persist(record.epoch)])
    host.on_record(msgspec.structs.replace(record, voters=(record.coordinator,)), revision + 1)
    host.on_record(record, revision + 2)
    simulation.schedule.run_until(3 * SECOND)
    assert node.hosts[0] is host and host.replica.role is Role.FOLLOWING


def test_a_copy_stays_when_a_watch_tells_of_what_was_long_ago() -> None:
    simulation = running()
    node, record, revision = follower_of(simulation)
    simulation.store.records[0] = (record, revision + 2)  # it has come back since
    gone = msgspec.structs.replace(record, voters=(record.coordinator,))
    node.hosts[0].on_record(gone, revision + 1)
    simulation.schedule.run_until(3 * SECOND)
    assert node.hosts[0].replica.role is Role.FOLLOWING and 0 in node.platters


def test_rot_that_a_scrub_meets_makes_another_replica() -> None:
    for coordinates in (False, True):
        simulation = running()
        node, record, _ = follower_of(simulation)
        if coordinates:
            node = simulation.nodes[record.coordinator]
        before = node.platters[0]
        before.bad = before.batches[len(before.batches) // 2].last
        node.scrub(0)
        simulation.schedule.run_until(6 * SECOND)
        simulation.heal()
        now, _ = simulation.store.records[0]
        assert now.uuids[node.name] == node.platters[0].uuid != before.uuid
        assert (now.epoch > record.epoch) is coordinates
        assert simulation.verdict().problems == []


def test_rot_that_a_reader_is_to_be_sent_ends_the_tenure() -> None:
    simulation = running(replace(QUIET, snapshot_batches=0))
    follower, record, _ = follower_of(simulation)
    coordinator = simulation.nodes[record.coordinator]
    follower.crash("killed")
    follower.wipe()
    bad = coordinator.platters[0]
    bad.bad = bad.batches[0].last
    follower.boot()
    simulation.schedule.run_until(6 * SECOND)
    simulation.heal()
    assert simulation.store.records[0][0].uuids[coordinator.name] != bad.uuid
    assert simulation.verdict().problems == []
