"""A replica's folder that is damaged when it is opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.node.replica.hosting import LOG

from penstock.errors import Corruption
from penstock.log.identity import ReplicaFile, asides
from penstock.log.partition import PartitionLog
from penstock.model.batch import Kind, seal
from penstock.model.entries import ENQ
from penstock.model.topic import topic_config
from penstock.node.replica.replay import OpenedReplica, open_replica

CONFIG = topic_config({"name": "jobs", "id": 1})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a replica that has promised epoch 3, and whose only entries are rotten."""
    folder = tmp_path / "0000"
    ReplicaFile(folder, uuid="old").promise(3)
    log = PartitionLog.open(folder, topic=1, partition=0, options=LOG)
    body = ENQ.encode(1, {"payload": [b"x"]})
    log.stage(
        seal(
            Kind.ENQ, body, topic=1, partition=0, epoch=3, epoch_previous=0, first=1, count=1,
            time_ms=1, chain_previous=0,
        )
    )  # fmt: skip
    flush = log.take()
    assert flush is not None
    log.advance_commit(log.write(flush))
    log.close()
    segment = min(folder.glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    return folder


def opened(folder: Path, **how: bool) -> OpenedReplica:
    return open_replica(folder, CONFIG, 0, options=LOG, alone=False, **how)


def test_a_damaged_replica_is_set_aside_and_begins_anew(folder: Path) -> None:
    found = opened(folder)
    assert found.file.uuid != "old" and found.file.promised == 3
    assert (found.log.sequence_last, found.log.seeding, found.aside) == (0, False, True)
    [kept] = asides(folder)
    assert ReplicaFile(kept).uuid == "old" and list(kept.glob("*.seg"))


def test_it_is_known_to_be_aside_until_it_is_removed(folder: Path) -> None:
    first = opened(folder)
    first.log.close()
    again = opened(folder)
    assert again.file.uuid == first.file.uuid and again.aside


def test_the_only_copy_is_refused_and_stays(folder: Path) -> None:
    with pytest.raises(Corruption):
        opened(folder, only=True)
    assert asides(folder) == [] and ReplicaFile(folder).uuid == "old"


def test_an_operator_may_accept_what_is_left_of_the_only_copy(folder: Path) -> None:
    found = opened(folder, only=True, accept_rot=True)
    assert (found.file.uuid, found.log.sequence_last) == ("old", 0)


def test_nothing_is_accepted_where_others_have_it_whole(folder: Path) -> None:
    assert opened(folder, accept_rot=True).file.uuid != "old"
