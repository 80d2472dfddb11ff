"""Mixes of faults. A profile and a seed determine a run completely."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from penstock.replication.facts import ReplicationOptions
from penstock.replication.takeover import Policy
from verification.simulation.schedule import MS

ALL_FAULTS: Final[dict[str, int]] = {
    "crash": 10,
    "fuse": 14,
    "power_loss": 2,
    "pause": 6,
    "cut": 8,
    "isolate": 4,
    "strand": 8,
    "cut_store": 3,
    "store_away": 2,
    "stale_watch": 4,
    "slow_disk": 4,
    "failed_sync": 3,
    "disk_full": 3,
    "rot": 3,
    "wipe": 2,
    "clock_jump": 3,
    "retarget": 6,
    "resign": 3,
    "restart": 3,
    "reset_stream": 5,
}


# Quicker than a real cluster, so that more happens in a run.
_QUICK: Final = ReplicationOptions(
    heartbeat_ms=100, silence_ms=450, stagger_ms=120, fence_ms=250, buffer_ms=1500
)
_TIGHT: Final = replace(
    _QUICK,
    credit_entries=12,
    credit_bytes=4096,
    ack_entries=4,
    buffer_batches=6,
    buffer_ms=800,
    caught_up_entries=8,
    lagging_ms=2000,
    backpressure_ms=300,
)


@dataclass(frozen=True)
class Profile:
    name: str = "mixed"
    nodes: int = 4
    partitions: int = 2
    replication_factor: int = 3
    duration_ms: int = 7000  # of the faults
    pause_ms: tuple[int, int] = (50, 1600)  # between two faults
    faults: dict[str, int] = field(default_factory=lambda: dict(ALL_FAULTS))  # by weight
    latency_us: tuple[int, int] = (200, 4 * MS)
    drop: float = 0.005
    duplicate: float = 0.01
    straggle: float = 0.01  # of the messages take up to `straggle_us` longer
    straggle_us: int = 900 * MS
    reorder: bool = False  # on streams too
    lost_answers: float = 0.1  # of the metadata store, after a write
    stale_lists: float = 0.1  # what a node that starts is told first, from a store that lags
    down_ms: tuple[int, int] = (20, 3000)  # until a process that ended is started again
    sync_us: tuple[int, int] = (300, 3 * MS)
    snapshot_batches: int = 40  # 0: never
    producers: int = 3
    consumers: int = 2
    atomics: int = 1
    decided_max: int = 0  # of atomic batches that are remembered though nobody can need them
    delay_ms_max: int = 2000  # of messages that are delayed
    fast_ms: int = 0  # what the clock of one node is ahead; no other is then set
    policy: Policy = Policy.BALANCED
    replication: ReplicationOptions = _QUICK


_CALM: Final = Profile(name="calm", nodes=3, faults={"clock_jump": 1}, drop=0, duplicate=0)


def _only(name: str, *faults: str, **changes: object) -> Profile:
    weights = {fault: max(4, ALL_FAULTS[fault]) for fault in faults}
    return replace(Profile(), name=name, faults=weights, **changes)  # type: ignore[arg-type]


PROFILES: Final[dict[str, Profile]] = {
    profile.name: profile
    for profile in (
        Profile(),
        _only("crashes", "crash", "fuse", "power_loss", "clock_jump", nodes=3),
        replace(
            Profile(),
            name="power",
            nodes=3,
            partitions=1,
            faults={"power_loss": 8, "slow_disk": 6, "fuse": 8, "crash": 6, "cut": 8, "pause": 4},
            sync_us=(1 * MS, 150 * MS),
            stale_lists=0.4,
            replication=replace(_QUICK, ack_entries=1),
        ),
        replace(
            Profile(),
            name="stale",
            nodes=3,
            partitions=1,
            faults={"stale_watch": 14, "pause": 8, "crash": 12, "isolate": 6, "cut": 8, "fuse": 6},
            pause_ms=(20, 900),
            down_ms=(10, 400),
            stale_lists=0.8,
        ),
        _only(
            "duels", "strand", "isolate", "pause", "crash", "fuse", "slow_disk", "resign", nodes=3,
            partitions=1, pause_ms=(200, 1800), producers=5, snapshot_batches=0,
        ),
        _only(
            "network", "cut", "isolate", "reset_stream", "pause", nodes=3, partitions=1, drop=0.03,
            duplicate=0.05, straggle=0.05,
        ),
        _only(
            "datagrams", "cut", "fuse", "crash", "reset_stream", "pause", partitions=1, drop=0.01,
            duplicate=0.08, straggle=0.1, reorder=True, replication=_TIGHT,
        ),
        _only(
            "disks", "slow_disk", "failed_sync", "disk_full", "rot", "wipe", "crash", "power_loss",
            "fuse",
            snapshot_batches=12,
        ),
        _only(
            "metadata", "cut_store", "store_away", "stale_watch", "resign", "restart",
            "fuse", "crash", "cut",
            lost_answers=0.3, stale_lists=0.5,
        ),
        _only(
            "moves", "retarget", "fuse", "crash", "cut", "stale_watch", "wipe", nodes=5,
            partitions=1, snapshot_batches=15,
        ),
        _only(
            "slow", "slow_disk", "pause", "cut", "crash", partitions=1, replication=_TIGHT,
            snapshot_batches=20,
        ),
        replace(Profile(), name="five", nodes=5, replication_factor=5, partitions=1),
        _only(
            "one", "retarget", "crash", "fuse", "slow_disk", "restart", "clock_jump", nodes=3,
            replication_factor=1,
        ),
        _only(
            "clocks", "crash", "fuse", "pause", "isolate", "resign", "restart", nodes=3,
            partitions=2, delay_ms_max=8000, fast_ms=3_600_000,
        ),
        replace(Profile(), name="two", nodes=3, replication_factor=2, policy=Policy.OLDEST),
        replace(_CALM, partitions=3, atomics=2, duration_ms=3000),
    )
}  # fmt: skip
