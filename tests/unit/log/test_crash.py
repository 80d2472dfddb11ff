"""Kill a writing process at every named point of the log; nothing acknowledged may be missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from penstock.errors import Corruption
from penstock.log.flush import LogOptions
from penstock.log.partition import PartitionLog
from penstock.log.verify import verify_folder
from verification.crash_points import LOG_POINTS

OPTIONS = LogOptions(segment_bytes=4096, allocate_bytes=4096, reserve_bytes=0, floor_s=0)

# Forks one writer for each point. A writer acknowledges on its stdout, a file beside its data, and
# works through appends, rolls, snapshots, rewrites and drops.
WRITERS = """
import json, os, sys
from pathlib import Path
import numpy as np
from penstock.log.folder import DataFolder
from penstock.log.flush import LogOptions
from penstock.log.partition import PartitionLog
from penstock.log.crash import arm
from penstock.model.batch import SCHEMAS, Kind, seal

options = LogOptions(segment_bytes=4096, allocate_bytes=4096, reserve_bytes=0, floor_s=0)

def stage(log, payload):
    body = SCHEMAS[Kind.ENQ].encode(2, {"payload": [payload, b"%d" % log.sequence_last]})
    batch = seal(Kind.ENQ, body, topic=1, partition=0, epoch=1, epoch_previous=log.epoch_last,
                 first=log.sequence_last + 1, count=2, time_ms=1, chain_previous=log.chain_last)
    if log.room(True) < batch.size:
        log.grow(batch.size)
    log.stage(batch)

def work(root):
    data = DataFolder.open(root)
    log = PartitionLog.open(data.partition(1, 0), topic=1, partition=0, options=options)
    for turn in range(30):
        for _ in range(3):
            stage(log, b"p" * 300)
        log.advance_commit(log.write(log.take()))
        os.write(1, b"%d\\n" % log.sequence_durable)
        if turn % 5 == 4:
            log.save_snapshot(sequence=log.sequence_durable, chain=log.chain_last, epoch=1,
                              parts=[b"a" * 50, b"b" * 50])
        if turn % 10 == 9:
            old = [s for s in log.segments() if s.sealed]
            log.rewrite(old[1].first, lambda first, last: np.array([first], np.uint64))
            log.drop_before(old[0].last + 1)

def run(root, point):
    pid = os.fork()
    if pid == 0:
        root.mkdir(exist_ok=True)
        os.dup2(os.open(root / "acks", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        arm(point)
        work(root)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

root = Path(sys.argv[1])
print(json.dumps({arg: run(root / arg.partition("/")[0], arg.partition("/")[2])
                  for arg in sys.argv[2:]}))
"""


@pytest.fixture(scope="module")
def crashes(tmp_path_factory):
    """The folder of all writers, and how each of them ended."""
    root = tmp_path_factory.mktemp("crashes")
    runs = [f"{point}/{point}:2" for point in WRITING_POINTS]
    runs += ["unarmed/no.such.point:1", "recovery/log.write.torn:5"]
    runs += ["recovery/log.recover.zeroed:1", "rot/log.write.before:9"]
    result = subprocess.run(
        [sys.executable, "-c", WRITERS, root, *runs], capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr.decode()
    return root, json.loads(result.stdout)


WRITING_POINTS = [point for point in LOG_POINTS if point != "log.recover.zeroed"]


def acknowledged(root):
    return int(((root / "acks").read_text().split() or ["0"])[-1])


def reopen(root):
    folder = root / "topics" / "00000001" / "0000"
    return PartitionLog.open(folder, topic=1, partition=0, options=OPTIONS)


@pytest.mark.parametrize("point", WRITING_POINTS)
def test_nothing_acknowledged_is_lost(point, crashes):
    root, exits = crashes
    assert exits[f"{point}/{point}:2"] == -signal.SIGKILL
    assert verify_folder(root / point).ok
    log = reopen(root / point)
    assert log.sequence_durable >= acknowledged(root / point)
    batches = list(log.reader.scan(1))
    assert batches[-1].last == log.sequence_durable
    assert batches[-1].chain == log.chain_last
    snapshot = log.load_snapshot()
    assert snapshot is None or snapshot.sequence <= log.sequence_durable
    assert not list(log.folder.glob("*.seg.tmp"))


def test_a_crash_while_a_torn_tail_is_cleared_is_harmless(crashes):
    root, exits = crashes
    assert exits["recovery/log.recover.zeroed:1"] == -signal.SIGKILL
    log = reopen(root / "recovery")
    assert log.sequence_durable >= acknowledged(root / "recovery") > 0
    assert list(log.reader.scan(1))[-1].last == log.sequence_durable


def test_an_unarmed_process_lives(crashes):
    root, exits = crashes
    assert exits["unarmed/no.such.point:1"] == 0
    assert acknowledged(root / "unarmed") == reopen(root / "unarmed").sequence_durable == 180


def test_rot_is_still_refused_after_a_crash(crashes):
    root, _ = crashes
    newest = max((root / "rot").rglob("*.seg"))
    data = bytearray(newest.read_bytes())
    data[64 + 32 + 80] ^= 1
    newest.write_bytes(data)
    with pytest.raises(Corruption):
        reopen(root / "rot")


def test_the_environment_arms_a_point(tmp_path):
    code = "from penstock.log.crash import crash_point; crash_point('a'); crash_point('a')"
    env = os.environ | {"PENSTOCK_CRASH": "a:2"}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -9
