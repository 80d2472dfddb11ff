"""A replica read back from disk, before anybody uses it. Everything here blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.errors import Corruption
from penstock.log.flush import LogOptions
from penstock.log.identity import ReplicaFile, asides, set_aside
from penstock.log.partition import PartitionLog
from penstock.model.topic import TopicConfig
from penstock.node.observe.logs import get_logger
from penstock.node.replica.heap_applier import ReplayedLog, replay
from penstock.replication.facts import LogFacts

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedReplica:
    """A log, who its replica is and what it has promised, and the heap after all that it holds."""

    log: PartitionLog
    file: ReplicaFile
    facts: LogFacts
    replayed: ReplayedLog
    aside: bool  # damaged copies of it are kept


def open_replica(
    folder: Path,
    config: TopicConfig,
    index: int,
    *,
    options: LogOptions,
    accept_rot: bool = False,
    alone: bool = True,
    only: bool = False,
    uuid: str = "",
) -> OpenedReplica:
    """Recover a partition's folder, made if missing.

    `uuid` is who a new replica becomes. It is given only where the partition's record is at epoch
    0: nothing was ever written then, so an empty disk may count as one of those it names.
    `alone`: the node is in no cluster; `only`: it is, and the partition has no other voter. In both
    cases nobody else has the data, so damage is refused with `Corruption`. Otherwise a damaged
    replica is set aside, and comes back under a new uuid as a copy of the others.
    """
    recover = partial(_recover, folder, config, index, options=options, alone=alone)
    try:
        return recover(accept_rot=accept_rot and (alone or only), uuid=uuid)
    except Corruption as error:
        if alone or only:
            raise
        # Nobody knows yet whether the others have all of it.
        log.critical(
            "a damaged replica starts over as a copy of the others",
            topic=config.name, partition=index, error=error.message, kept=str(set_aside(folder)),
        )  # fmt: skip
    return recover()


def _recover(
    folder: Path,
    config: TopicConfig,
    index: int,
    *,
    options: LogOptions,
    alone: bool,
    accept_rot: bool = False,
    uuid: str = "",
) -> OpenedReplica:
    file = ReplicaFile(folder, uuid=uuid)
    stored = PartitionLog.open(
        folder, topic=config.id, partition=index, options=options, accept_rot=accept_rot
    )
    if stored.seeding and not alone:  # a copy was cut short; nothing of it counts yet
        empty(stored)
    facts = _end_of(stored) if alone else facts_of(stored)
    return OpenedReplica(stored, file, facts, replay(stored, config), bool(asides(folder)))


def empty(stored: PartitionLog) -> None:
    """Forget everything: the log begins at 1 again."""
    stored.reset(first=1, chain=0, epoch=0)
    stored.finish_seeding()


def facts_of(stored: PartitionLog) -> LogFacts:
    """What replication wants to know of a log: epochs from before its first verbatim entry on."""
    first = stored.reader.first_as_written()
    runs = stored.reader.epoch_runs(first - 1)
    base = stored.base
    if base.first == first > 1:  # what stood before it is not held, but its epoch is known
        if runs and runs[0][0] == base.epoch:
            runs[0] = (base.epoch, first - 1)
        else:
            runs.insert(0, (base.epoch, first - 1))
    return LogFacts(
        first=first, last=stored.sequence_last, durable=stored.sequence_durable, runs=runs
    )


def _end_of(stored: PartitionLog) -> LogFacts:
    """The same where nobody will ever ask for more than the end."""
    last = stored.sequence_last
    runs = [(stored.epoch_last, last)] if last else []
    return LogFacts(first=last + 1, last=last, durable=last, runs=runs)
