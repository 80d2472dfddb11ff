"""A pipeline's state: whose it is, who drives it, and snapshots, verified when they are read."""

from pathlib import Path

import msgspec
import pytest

from penstock.errors import Corruption, FailedPrecondition, NotFound, Unavailable, WrongEpoch
from penstock.model.topic import TopicConfig, TopicKind
from penstock.propagation.options import PropagationOptions
from penstock.spark.fold.state import (
    DriverClaim,
    FoldHead,
    FoldSnapshots,
    PipelineIdentity,
    TopicHeads,
    claim_identity,
    heads_for,
    read_identity,
    running_pid,
    snapshots_of,
)
from penstock.spark.store import FolderStore, StoreAddress


def topic(name: str = "vectors", *, id: int = 1, dimensions: int = 16) -> TopicConfig:
    return TopicConfig(name=name, id=id, kind=TopicKind.DELTA, dimensions=dimensions, partitions=8)


def claimed_by(folder: Path, *, name: str = "p", **options: int) -> PipelineIdentity:
    propagation = PropagationOptions(**options)
    return claim_identity(FolderStore(folder), name=name, propagation=propagation)


def test_a_new_state_gets_an_id_that_it_keeps(tmp_path: Path) -> None:
    made = claimed_by(tmp_path / "state")
    assert claimed_by(tmp_path / "state") == made == read_identity(FolderStore(tmp_path / "state"))
    assert claimed_by(tmp_path / "other").id != made.id


def test_the_state_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    claimed_by(tmp_path)
    with pytest.raises(FailedPrecondition, match="state of the pipeline p, not of q"):
        claimed_by(tmp_path, name="q")


def test_a_state_that_was_folded_otherwise_is_refused(tmp_path: Path) -> None:
    claimed_by(tmp_path)
    with pytest.raises(FailedPrecondition, match="cannot be changed"):
        claimed_by(tmp_path, pending_ms=1)


@pytest.mark.parametrize("content", ["{", '{"version":3,"id":1}', "[]"])
def test_a_damaged_identity_is_corruption(tmp_path: Path, content: str) -> None:
    (tmp_path / "pipeline.json").write_text(content)
    with pytest.raises(Corruption, match="cannot be read"):
        read_identity(FolderStore(tmp_path))


@pytest.mark.parametrize("version", [2, 4])
def test_an_identity_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    other = msgspec.structs.replace(claimed_by(tmp_path), version=version)
    (tmp_path / "pipeline.json").write_bytes(msgspec.json.encode(other))
    with pytest.raises(FailedPrecondition, match=f"version {version}"):
        read_identity(FolderStore(tmp_path))


def test_a_further_topic_is_added_and_one_that_is_gone_keeps_its_place() -> None:
    head = FoldHead(start=1, sequence=7)
    known = {"vectors": TopicHeads(id=1, dimensions=16, partitions={0: head})}
    found = heads_for([topic("more", id=2)], known)
    assert found == known | {"more": TopicHeads(id=2, dimensions=16)}
    assert heads_for([topic()], found) == found


@pytest.mark.parametrize("other", [topic(id=2), topic(dimensions=4)])
def test_a_topic_that_is_not_the_same_any_more_is_refused(other: TopicConfig) -> None:
    with pytest.raises(FailedPrecondition, match="not the topic this pipeline has read"):
        heads_for([other], heads_for([topic()], {}))


# --- who drives ---


def test_a_second_driver_on_the_machine_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first = DriverClaim(StoreAddress(url=str(tmp_path)))
    pid = running_pid(tmp_path)
    assert pid is not None
    with pytest.raises(Unavailable, match=f"in use by the pipeline of process {pid}"):
        DriverClaim(StoreAddress(url=str(tmp_path)))
    first.close()
    assert running_pid(tmp_path) is None
    DriverClaim(StoreAddress(url=str(tmp_path))).close()


def test_the_latest_claim_drives(tmp_path: Path) -> None:
    first = DriverClaim(StoreAddress(url=str(tmp_path)))
    first.check()
    first.close()
    second = DriverClaim(StoreAddress(url=str(tmp_path)))
    assert second.number > first.number
    second.check()
    with pytest.raises(WrongEpoch, match=f"claim {second.number}"):
        first.check()
    assert [path.name for path in (tmp_path / "drivers").iterdir()] == ["00000002.json"]


# --- snapshots ---


def snapshots(folder: Path, *, claim: int = 1) -> FoldSnapshots:
    return FoldSnapshots(FolderStore(folder), claim=claim)


def written(folder: Path, content: bytes = bytes(64), **place: int) -> str:
    where = {"partition": 0, "sequence": 1} | place
    return snapshots(folder).write([content], kind="base", topic="t", **where)[0]


def test_a_snapshot_is_read_back(tmp_path: Path) -> None:
    name, size = snapshots(tmp_path).write(
        [b"abc", memoryview(b"def")], kind="increment", topic="a-b", partition=3, sequence=17
    )
    assert (name, size) == ("00000001-a-b-3-17.increment", 6)
    assert bytes(snapshots(tmp_path).read(name)) == b"abcdef"


def test_an_empty_content_is_a_content(tmp_path: Path) -> None:
    assert bytes(snapshots(tmp_path).read(written(tmp_path, b""))) == b""


@pytest.mark.parametrize("at", [0, 9, 17, 25, 40])
def test_any_changed_byte_is_noticed(tmp_path: Path, at: int) -> None:
    path = tmp_path / "snapshots" / written(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corruption):
        snapshots(tmp_path).read(path.name)


@pytest.mark.parametrize("length", [0, 10, 50])
def test_a_short_snapshot_is_noticed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "snapshots" / written(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(Corruption):
        snapshots(tmp_path).read(path.name)


def test_a_missing_snapshot_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"t-0-9\.base"):
        snapshots(tmp_path).read("t-0-9.base")


def test_sweeping_takes_only_what_earlier_drivers_left_and_no_head_names(tmp_path: Path) -> None:
    kept, stray = written(tmp_path, sequence=5), written(tmp_path, sequence=6)
    later = snapshots(tmp_path, claim=2)
    own, _ = later.write([b"x"], kind="base", topic="t", partition=0, sequence=7)
    more = written(tmp_path, sequence=4)
    head = FoldHead(start=1, sequence=5, snapshots=(more, kept))
    heads = {"t": TopicHeads(id=1, dimensions=2, partitions={0: head})}
    assert later.sweep(snapshots_of(heads)) == 1
    assert {path.name for path in (tmp_path / "snapshots").iterdir()} == {more, kept, own}
    assert stray not in {more, kept, own}
