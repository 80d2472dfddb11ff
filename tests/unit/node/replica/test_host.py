"""Three hosts of one partition: commit, failover, credit, cuts, restarts and copies."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.node.replica.hosting import (
    START_MS,
    Cluster,
    SlowDisk,
    lease,
    payloads,
    put,
    reject,
    settle,
)

from penstock.cluster.reserve import Reserve
from penstock.errors import Backpressure, QuorumUnavailable, Unavailable
from penstock.node.replica.host import Host
from penstock.node.upkeep import retain, take_snapshot
from penstock.replication.effects import Halt, Persist, Truncate
from penstock.replication.replica import Role

MESSAGE = b"m" * 1000


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await cluster.start()
    yield cluster
    await cluster.stop()
    assert cluster.fatal == []


async def test_the_preferred_node_serves_and_the_others_follow(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    roles = {name: host.role for name, host in cluster.hosts.items()}
    assert roles == {"a": Role.SERVING, "b": Role.FOLLOWING, "c": Role.FOLLOWING}
    assert leader.topic.local == [leader.partition]
    assert cluster.hosts["b"].topic.local == []


async def test_what_is_answered_is_on_a_majority(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await cluster.until(lambda: len(leader.replica.coordinator.senders) == 2)
    cluster.isolate("c")
    answer = await put(leader, [b"one", b"two"])
    last = answer.placed[0].sequence + 1
    assert [cluster.hosts[n].log.sequence_durable >= last for n in "abc"].count(True) == 2
    assert cluster.hosts["c"].log.sequence_last < last


async def test_replicas_end_with_equal_heaps(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await put(leader, [b"%d" % i for i in range(50)])
    tokens = await lease(leader, 20)
    await settle(leader, tokens[:10])
    await cluster.at_rest()
    digests = {host.heap.digest() for host in cluster.hosts.values()}
    chains = {host.log.chain_last for host in cluster.hosts.values()}
    assert (len(digests), len(chains)) == (1, 1)


async def test_a_failover_keeps_what_was_acknowledged(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await put(leader, [b"first", b"second"], producer=(b"p", 1))
    await put(leader, [b"later"], delay_ms=5000)
    dead, held = (await lease(leader, 2))[:1], None
    held = dead + 1
    await reject(leader, dead)
    await cluster.stop("a")
    taker = await cluster.serving()
    assert payloads(taker) == [b"first", b"second", b"later"]
    again = await put(taker, [b"first", b"second"], producer=(b"p", 1))
    assert [d.sequence for d in again.duplicates] == [2, 3] and not again.placed
    assert (taker.heap.dead, taker.heap.delayed, taker.heap.leased) == (1, 1, 1)
    assert await settle(taker, held) == []  # the lease outlived its coordinator
    cluster.clock.advance(6)
    assert len(taker.heap.select(10, cluster.clock.now_ms())) == 1


async def test_leases_are_armed_anew_by_a_takeover(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await put(leader, [b"job"])
    await lease(leader, 1)
    cluster.clock.advance(50)  # of its 60 s
    await cluster.stop("a")
    taker = await cluster.serving()
    assert taker.heap.next_wakeup() >= START_MS + 50_000 + 60_000


async def test_a_barrier_is_written_after_the_tail_that_it_follows(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    cluster.isolate("b")
    await put(leader, [b"only on a and c"])
    await cluster.stop("a")
    cluster.heal("b")
    taker = cluster.hosts["b"]
    disk = SlowDisk(taker)
    await cluster.until(lambda: taker.role is Role.ENTERING and taker.log.epoch_last == 2)
    disk.let_go()
    assert await cluster.serving() is taker
    assert payloads(taker) == [b"only on a and c"]


async def test_without_a_majority_nothing_is_taken(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await put(leader, [b"kept"])
    tokens = await lease(leader, 1)
    await cluster.stop("b", "c")
    await cluster.until(lambda: leader.replica.writable(cluster.now_ms) is not None)
    with pytest.raises(QuorumUnavailable):
        await put(leader, [b"refused"])
    with pytest.raises(QuorumUnavailable):
        await settle(leader, tokens)
    assert not leader.partition.has_room_to_lease(1)


async def test_who_waits_when_a_tenure_ends_is_told_that_the_outcome_is_unknown(
    cluster: Cluster,
) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    cluster.isolate("a")
    doubtful = put(leader, [b"doubtful"])
    partition = leader.partition
    await _taker(cluster)
    cluster.heal("a")
    with pytest.raises(Unavailable, match="unknown"):
        await doubtful
    assert leader.partition is None and leader.topic.local == []
    with pytest.raises(Unavailable):
        await partition.committed(1)


async def test_a_deposed_coordinator_cuts_off_and_builds_its_heap_anew(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await put(leader, [b"kept"])
    await cluster.at_rest()
    cluster.isolate("a")
    lost = put(leader, [b"lost"])
    await cluster.until(lambda: leader.heap.ready == 2)
    before = leader.heap
    await put(await _taker(cluster), [b"new"])
    cluster.heal("a")
    await cluster.at_rest()
    assert isinstance(lost.exception(), Unavailable)
    assert leader.heap is not before
    assert payloads(leader) == [b"kept", b"new"] and leader.heap.ready == 2
    assert leader.heap.digest() == cluster.hosts["b"].heap.digest()


async def test_a_resigned_coordinator_keeps_its_heap(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await put(leader, [b"one"])
    before = leader.heap
    await leader.resign()
    taker = await _taker(cluster)
    await cluster.at_rest()
    assert taker is not leader and leader.heap is before
    assert leader.heap.digest() == taker.heap.digest()


async def test_a_slow_follower_costs_its_window_and_delays_nobody(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, credit=(1000, 64 << 10))
    await cluster.start()
    leader = await cluster.serving()
    await cluster.at_rest()
    cluster.slow["c"] = []
    sent = cluster.networks["a"].bytes_to
    before = sent["c"]
    for _ in range(10):
        await put(leader, [MESSAGE] * 20)
    assert sent["b"] > 200_000
    assert sent["c"] - before <= (64 << 10) + 20 * 1100  # the window, and one batch
    assert leader.replica.coordinator.senders["c"].credit.exhausted
    cluster.speed_up()
    await cluster.at_rest()
    await cluster.stop()


async def test_credit_that_runs_out_is_a_warning_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.node.replica.host.CREDIT_TOLD_MS", 5000)
    cluster = Cluster(tmp_path, credit=(10, 8 << 20))
    await cluster.start()
    leader = await cluster.serving()
    await cluster.at_rest()

    async def use_up() -> list[str]:
        caplog.clear()
        for _ in range(3):
            await put(leader, [b"small"] * 20)  # more than the window
            await cluster.at_rest()
        lines = [r.msg for r in caplog.records if r.levelno == logging.WARNING]
        return sorted(f"{line['follower']} {line['what']}" for line in lines)

    each = ["b credit_exhausted", "b credit_low", "c credit_exhausted", "c credit_low"]
    assert await use_up() == each
    assert await use_up() == []
    later = cluster.now_ms + 5000
    await cluster.until(lambda: cluster.now_ms >= later)
    assert await use_up() == each
    await cluster.stop()


async def test_writers_are_slowed_down_when_a_majority_is_slow(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, credit=(1000, 16 << 10))
    await cluster.start()
    leader = await cluster.serving()
    await cluster.at_rest()
    cluster.slow = {"b": [], "c": []}
    waiting = [put(leader, [MESSAGE] * 20) for _ in range(3)]
    await cluster.until(lambda: leader.replica.writable(cluster.now_ms) is not None)
    with pytest.raises(Backpressure):
        await put(leader, [b"too much"])
    cluster.speed_up()
    await cluster.until(lambda: all(answer.done() for answer in waiting))
    await cluster.stop()


async def test_a_slice_has_no_more_entries_than_there_is_credit_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, credit=(50, 8 << 20))
    await cluster.start()
    leader = await cluster.serving()
    await cluster.at_rest()
    cluster.slow["c"] = []
    cluster.clogged.add("c")
    before = cluster.networks["a"].entries_to["c"]
    for _ in range(10):
        await put(leader, [b"small"] * 20)
    cluster.clogged.clear()
    leader.on_writable("c")  # ten batches are there by now
    assert 40 <= cluster.networks["a"].entries_to["c"] - before <= 50 + 20
    cluster.speed_up()
    await cluster.at_rest()
    await cluster.stop()


async def test_a_full_connection_is_gone_on_with_when_it_is_writable(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    cluster.clogged.add("c")
    await put(leader, [b"one"])
    assert cluster.hosts["c"].log.sequence_last < leader.log.sequence_last
    cluster.clogged.clear()
    leader.on_writable("c")
    await cluster.at_rest()


async def test_all_three_start_again_with_all_they_had(cluster: Cluster) -> None:
    leader = await cluster.serving()
    for i in range(20):
        await put(leader, [b"%d" % i])
    await settle(leader, await lease(leader, 5))
    await cluster.stop()
    await cluster.start()
    leader = await cluster.serving()
    await cluster.at_rest()
    assert payloads(leader) == [b"%d" % i for i in range(20)]
    assert (leader.heap.ready, leader.heap.leased) == (15, 0)
    assert len({host.heap.digest() for host in cluster.hosts.values()}) == 1


async def test_who_missed_what_retention_dropped_starts_over_from_a_snapshot(
    cluster: Cluster, tmp_path: Path
) -> None:
    leader = await cluster.serving()
    await put(leader, [b"before"])
    await cluster.at_rest()
    await cluster.stop("c")
    await _fill_and_settle(leader, 300)
    await _shrink(cluster, leader, tmp_path)
    assert leader.log.sequence_first > 100
    await put(leader, [b"after"])
    await cluster.start("c")
    await cluster.at_rest()
    late = cluster.hosts["c"]
    assert late.log.sequence_first > 100
    assert late.heap.digest() == leader.heap.digest()
    await cluster.stop("a")  # the copy counts like any other
    await put(await _taker(cluster), [b"again"])
    assert cluster.hosts["c"].role in (Role.FOLLOWING, Role.SERVING)


async def test_followers_take_snapshots_and_drop_old_segments(
    cluster: Cluster, tmp_path: Path
) -> None:
    leader = await cluster.serving()
    await _fill_and_settle(leader, 300)
    await cluster.at_rest()
    follower = cluster.hosts["b"]
    reserve = Reserve(tmp_path / "reserve", 4096)
    for _ in range(2):
        await take_snapshot(follower, cluster.clock.now_ms(), reserve=reserve)
        await put(leader, [b"more"])
        await cluster.at_rest()
    cluster.clock.advance(3600)
    assert await retain(follower, cluster.clock.now_ms()) > 0
    assert follower.log.sequence_first > 100
    await cluster.stop("b")
    await cluster.start("b")
    await cluster.at_rest()
    assert cluster.hosts["b"].heap.digest() == leader.heap.digest()


async def test_a_damaged_replica_comes_back_as_a_copy(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await _fill_and_settle(leader, 100)
    await cluster.at_rest()
    await cluster.stop("c")
    segment = next((cluster.folder / "c" / "t" / "p").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[5000] ^= 0xFF
    segment.write_bytes(data)
    await cluster.start("c")
    assert cluster.hosts["c"].replica.uuid != "uuid-c"
    await cluster.until(lambda: cluster.record.uuids["c"] == cluster.hosts["c"].replica.uuid)
    await cluster.at_rest()
    assert cluster.hosts["c"].heap.digest() == leader.heap.digest()


async def test_an_idle_stream_hears_of_a_commit_without_a_tick(cluster: Cluster) -> None:
    leader = await cluster.serving()
    await cluster.at_rest()
    await put(leader, [b"one"])
    last = leader.log.sequence_last
    async with asyncio.timeout(60):  # nothing ticks here
        while min(host.committed for host in cluster.hosts.values()) < last:
            await asyncio.sleep(0.001)


async def test_a_snapshot_waits_for_the_own_disk(cluster: Cluster, tmp_path: Path) -> None:
    leader = await cluster.serving()
    await cluster.until(lambda: len(leader.replica.coordinator.senders) == 2)
    gate = threading.Event()
    slow = asyncio.create_task(leader.flusher.alone(gate.wait))
    await cluster.until(lambda: leader.flusher._alone)
    await put(leader, [b"on the others"])
    reserve = Reserve(tmp_path / "reserve", 4096)
    taking = asyncio.create_task(take_snapshot(leader, START_MS, reserve=reserve))
    await cluster.until(lambda: leader.committed > leader.log.sequence_durable)
    gate.set()
    await slow
    leader.flusher.flush()
    await taking
    assert 0 < leader.snapshot.sequence <= leader.log.sequence_durable


async def _taker(cluster: Cluster) -> Host:
    await cluster.until(lambda: cluster.record.epoch > 1)
    return await cluster.serving()


async def _fill_and_settle(host: Host, count: int) -> None:
    for _ in range(count // 10):
        await put(host, [MESSAGE] * 10)
        await settle(host, await lease(host, 10))


async def _shrink(cluster: Cluster, host: Host, folder: Path) -> None:
    """Two snapshots, and all that is older than an hour dropped."""
    reserve = Reserve(folder / "reserve", 4096)
    for _ in range(2):
        await take_snapshot(host, cluster.clock.now_ms(), reserve=reserve)
        await put(host, [b"more"])
    cluster.clock.advance(3600)
    assert await retain(host, cluster.clock.now_ms()) > 0
    await host.on_shrunk()


# --- effects, one after the other ---


async def test_what_follows_a_slow_effect_waits_for_it(cluster: Cluster) -> None:
    host = cluster.hosts["b"]
    host._perform([Persist(7), Halt("at last")])
    assert host.halted == ""
    await cluster.until(lambda: host.halted == "at last")
    assert host._file.promised == 7


async def test_a_slow_effect_that_never_began_leaves_no_coroutine_behind(cluster: Cluster) -> None:
    """Before, a node that stopped in the same turn wrote that a coroutine was never awaited."""
    before = set(cluster.tasks)
    cluster.hosts["b"]._perform([Persist(7)])
    begun = cluster.tasks - before
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
    await asyncio.sleep(0)
    gc.collect()  # a coroutine that is left complains here, which fails the test
    assert len(begun) == 1
    assert cluster.hosts["b"]._file.promised < 7


async def test_damage_that_an_effect_meets_halts_the_replica(cluster: Cluster) -> None:
    await put(await cluster.serving(), [b"one"])
    await cluster.at_rest()
    host = cluster.hosts["b"]
    host._perform([Truncate(0)])  # what is committed
    await cluster.until(lambda: "cannot be cut" in host.halted)


async def test_a_mistake_of_ours_in_an_effect_is_told(cluster: Cluster) -> None:
    cluster.hosts["b"]._perform([None])  # type: ignore[list-item]
    assert [type(error) for error in cluster.fatal] == [KeyError]
    cluster.fatal.clear()


async def test_nothing_is_done_after_the_end(cluster: Cluster) -> None:
    host = cluster.hosts["b"]
    await cluster.stop("b")
    host._perform([Halt("too late")])
    assert host.halted == ""
