"""Kill a replica in the middle of a cut, a reset, a seeding or a promise: all of it or nothing."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys

import pytest

from penstock.log.flush import LogOptions
from penstock.log.identity import ReplicaFile
from penstock.log.partition import PartitionLog
from penstock.log.verify import verify_folder
from penstock.model.batch import SCHEMAS, Kind, seal
from verification.crash_points import REPLICA_POINTS

OPTIONS = LogOptions(segment_bytes=4096, allocate_bytes=4096, reserve_bytes=0, floor_s=1e9)
OLD, COMMITTED = 120, 20  # the end before a cut, and what is committed then

# Makes a log of groups of three batches of two messages, over five segments. Forks a process for
# each run (name, operation, point), which copies the log, arms the point, and works.
RUNS = """
import json, os, shutil, sys
from pathlib import Path
from penstock.log.folder import DataFolder
from penstock.log.flush import LogOptions
from penstock.log.partition import PartitionLog
from penstock.log.identity import ReplicaFile
from penstock.log.crash import arm
from penstock.model.batch import SCHEMAS, Kind, seal

options = LogOptions(segment_bytes=4096, allocate_bytes=4096, reserve_bytes=0, floor_s=1e9)

def write(log, groups):
    for _ in range(groups):
        for _ in range(3):
            body = SCHEMAS[Kind.ENQ].encode(2, {"payload": [b"p" * 200, b"q"]})
            batch = seal(Kind.ENQ, body, topic=1, partition=0, epoch=1,
                         epoch_previous=log.epoch_last, first=log.sequence_last + 1, count=2,
                         time_ms=1, chain_previous=log.chain_last)
            if log.room(True) < batch.size:
                log.grow(batch.size)
            log.stage(batch)
        log.write(log.take())

def reset(log):
    log.reset(first=41, chain=9, epoch=1)

def seed(log):
    reset(log)
    log.install_snapshot(sequence=40, chain=9, epoch=1, parts=[b"state"])
    write(log, 2)
    log.finish_seeding()

def prepare(root):
    with DataFolder.open(root) as data:
        folder = data.partition(1, 0)
        ReplicaFile(folder, uuid="u").promise(1)
        log = PartitionLog.open(folder, topic=1, partition=0, options=options)
        write(log, 20)
        log.advance_commit(20)
        log.close()
        data.inventory.add(1, 0, name="jobs", uuid="u")

def work(root, operation, point):
    shutil.copytree(root.parent / "template", root)
    data = DataFolder.open(root)
    folder = data.partition(1, 0)
    replica = ReplicaFile(folder)
    log = PartitionLog.open(folder, topic=1, partition=0, options=options)
    arm(point)
    if operation.startswith("cut"):
        log.truncate(int(operation[3:]))
    elif operation == "promise":
        replica.promise(2)
    else:
        {"reset": reset, "seed": seed}[operation](log)

def open_again(root, point):
    arm(point)
    PartitionLog.open(root / "topics/00000001/0000", topic=1, partition=0, options=options)

def run(root, operation, point):
    pid = os.fork()
    if pid == 0:
        if operation == "open":
            open_again(root, point)
        else:
            work(root, operation, point)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

root = Path(sys.argv[1])
prepare(root / "template")
print(json.dumps([run(root / name, *rest) for name, *rest in json.loads(sys.argv[2])]))
"""

# Inside of a group, at a segment's end, between groups; in the oldest to the newest segment.
CUTS = ("cut20", "cut48", "cut62", "cut114", "cut118")
CUT_POINTS = [p for p in REPLICA_POINTS if p.startswith("log.truncate")]
CUT_POINTS += ["log.floor.before", "log.floor.written", "log.recover.zeroed"]
CUT_POINTS += ["log.truncate.between:3", "log.floor.before:2", "log.floor.written:3"]
RESET_POINTS = [p for p in REPLICA_POINTS if p.startswith("log.reset")]
RESET_POINTS += ["log.reset.between:6", "log.floor.written", "log.floor.before:3"]
SEED_POINTS = ["log.seed.before", "log.seed.after", "log.snapshot.renamed", "log.write.torn"]
SEED_POINTS += ["log.roll.synced", "log.roll.renamed", "log.floor.before:5", "log.floor.written:5"]
PROMISE_POINTS = ["log.replica.before", "log.replica.written", "log.replica.written:2"]
AGAIN = ["log.truncate.between", "log.truncate.removed", "log.recover.zeroed", "log.truncate.cut"]


def at(operation, point):
    return [f"{operation}-{point}", operation, point]


PLAN = [at(cut, point) for cut in CUTS for point in CUT_POINTS]
PLAN += [at("reset", point) for point in RESET_POINTS]
PLAN += [at("seed", point) for point in SEED_POINTS]
PLAN += [at("promise", point) for point in PROMISE_POINTS]
POWER = ("log.truncate.intended", "log.truncate.cut")
PLAN += [[f"power-{cut}-{point}", cut, point] for cut in CUTS for point in POWER]
for again in AGAIN:  # a second crash, while the first one's cut is being finished
    PLAN.append([f"again-{again}", "cut62", "log.truncate.intended"])
    PLAN.append([f"again-{again}", "open", again])


@pytest.fixture(scope="module")
def crashes(tmp_path_factory):
    root = tmp_path_factory.mktemp("crashes")
    result = subprocess.run(
        [sys.executable, "-c", RUNS, root, json.dumps(PLAN)], capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr.decode()
    return root, dict(zip(map(tuple, PLAN), json.loads(result.stdout), strict=True))


def reopen(root):
    assert verify_folder(root).ok
    folder = root / "topics" / "00000001" / "0000"
    return PartitionLog.open(folder, topic=1, partition=0, options=OPTIONS)


def check_goes_on(log):
    """The log is whole up to its end, and a batch can follow there."""
    ends = [batch.last for batch in log.reader.scan(1)]
    assert ends == list(range(log.sequence_first + 1, log.sequence_last + 1, 2))
    body = SCHEMAS[Kind.ENQ].encode(1, {"payload": [b"next"]})
    batch = seal(
        Kind.ENQ, body, topic=1, partition=0, epoch=2, epoch_previous=log.epoch_last, count=1,
        first=log.sequence_last + 1, time_ms=2, chain_previous=log.chain_last,
    )  # fmt: skip
    log.grow(batch.size)
    log.stage(batch)
    log.write(log.take())
    again = PartitionLog.open(log.folder, topic=1, partition=0, options=OPTIONS)
    assert (again.sequence_last, again.chain_last) == (batch.last, batch.chain)
    assert sum(1 for _ in again.reader.scan(1)) == len(ends) + 1


def is_newest(cut):
    """The cut is in the newest segment: no file goes."""
    return cut in ("cut114", "cut118")


BEFORE = ("log.truncate.before", "log.floor.before", "log.reset.before")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("point", CUT_POINTS)
def test_a_cut_happens_or_it_does_not(crashes, cut, point):
    root, exits = crashes
    reached = not (is_newest(cut) if "between" in point else cut == "cut48" and "zeroed" in point)
    assert exits[tuple(at(cut, point))] == (-signal.SIGKILL if reached else 0)
    log = reopen(root / f"{cut}-{point}")
    assert log.sequence_last == (OLD if point in BEFORE else int(cut[3:]))
    assert log.sequence_committed == COMMITTED
    check_goes_on(log)


@pytest.mark.parametrize("point", AGAIN)
def test_a_cut_is_finished_after_any_number_of_crashes(crashes, point):
    root, exits = crashes
    assert exits[(f"again-{point}", "open", point)] == -signal.SIGKILL
    log = reopen(root / f"again-{point}")
    assert log.sequence_last == 62
    check_goes_on(log)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("stride", [8, 512])
def test_a_power_cut_during_a_cut_leaves_any_part_of_it(crashes, tmp_path, cut, stride):
    """Of what was written after the intent, each sector is there or not; so is each name."""
    before, after = (crashes[0] / f"power-{cut}-{point}" for point in POWER)
    dice = random.Random(cut)
    for round in range(20):
        root = shutil.copytree(before, tmp_path / str(round))
        share = dice.random()
        for path in [path.relative_to(before) for path in before.rglob("*.seg")]:
            if not (after / path).exists():
                if dice.random() < share:
                    (root / path).unlink()
                continue
            images = (before / path).read_bytes(), (after / path).read_bytes()
            mixed = [
                images[dice.random() < share][at : at + stride]
                for at in range(0, len(images[0]), stride)
            ]
            (root / path).write_bytes(b"".join(mixed))
        log = reopen(root)
        assert log.sequence_last == int(cut[3:])
        check_goes_on(log)


@pytest.mark.parametrize("point", RESET_POINTS)
def test_a_reset_happens_or_it_does_not(crashes, point):
    root, exits = crashes
    assert exits[tuple(at("reset", point))] == -signal.SIGKILL
    log = reopen(root / f"reset-{point}")
    if point in BEFORE:
        assert (log.sequence_first, log.sequence_last, log.seeding) == (1, OLD, False)
    else:
        assert (log.base, log.sequence_last, log.seeding) == ((41, 9, 1), 40, True)
        assert not list(log.folder.glob("*.seg"))
    check_goes_on(log)


@pytest.mark.parametrize("point", SEED_POINTS)
def test_a_seeding_is_finished_or_known_not_to_be(crashes, point):
    root, exits = crashes
    assert exits[tuple(at("seed", point))] == -signal.SIGKILL
    log = reopen(root / f"seed-{point}")
    finished = point in ("log.seed.after", "log.floor.written:5")
    assert log.seeding is not finished
    if finished:
        assert log.load_snapshot().sequence == log.sequence_committed == 40
        assert log.sequence_last == 52
    check_goes_on(log)


@pytest.mark.parametrize("point", PROMISE_POINTS)
def test_a_promise_is_made_or_it_is_not(crashes, point):
    root, exits = crashes
    assert exits[tuple(at("promise", point))] == -signal.SIGKILL
    root /= f"promise-{point}"
    report = verify_folder(root)
    assert report.ok and len(report.notes) == (point == "log.replica.written")
    replica = ReplicaFile(root / "topics" / "00000001" / "0000")
    assert (replica.uuid, replica.promised) == ("u", 1 if "before" in point else 2)


def test_every_point_of_a_replica_is_tried():
    tried = {point for *_, point in PLAN}
    assert set(REPLICA_POINTS) <= tried
