"""Kill a writing process at every named point of the log; nothing acknowledged may be missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from penstock.errors import Corruption
from penstock.log import DataFolder, LogOptions, PartitionLog, verify_folder
from penstock.log.crash import LOG_POINTS

OPTIONS = LogOptions(segment_bytes=4096, allocate_bytes=4096, reserve_bytes=0, floor_s=0)

# Acknowledges on stdout; works through appends, rolls, snapshots, rewrites and drops.
WRITER = """
import sys
from pathlib import Path
import numpy as np
from penstock.log import LogOptions, PartitionLog
from penstock.model.batch import SCHEMAS, Kind, seal

options = LogOptions(segment_bytes=4096, allocate_bytes=4096, reserve_bytes=0, floor_s=0)
log = PartitionLog.open(Path(sys.argv[1]), topic=1, partition=0, options=options)

def stage(payload):
    body = SCHEMAS[Kind.ENQ].encode(2, {"payload": [payload, b"%d" % log.sequence_last]})
    batch = seal(Kind.ENQ, body, topic=1, partition=0, epoch=1, epoch_previous=log.epoch_last,
                 first=log.sequence_last + 1, count=2, time_ms=1, chain_previous=log.chain_last)
    if log.room(True) < batch.size:
        log.grow(batch.size)
    log.stage(batch)

print("ready", flush=True)
for turn in range(200):
    for _ in range(3):
        stage(b"p" * 300)
    print(log.write(log.take()), flush=True)
    if turn % 5 == 4:
        log.save_snapshot(sequence=log.sequence_durable, chain=log.chain_last, epoch=1,
                          parts=[b"a" * 50, b"b" * 50])
    if turn % 10 == 9:
        old = [s for s in log.segments() if s.sealed]
        log.rewrite(old[1].first, lambda first, last: np.array([first], np.uint64))
        log.drop_before(old[0].last + 1)
"""


def run(folder, crash=None):
    env = os.environ | ({"PENSTOCK_CRASH": crash} if crash else {})
    return subprocess.run(
        [sys.executable, "-c", WRITER, str(folder)], env=env, capture_output=True, check=False
    )


def acknowledged(result):
    return max((int(line) for line in result.stdout.split() if line.isdigit()), default=0)


WRITING_POINTS = [point for point in LOG_POINTS if point != "log.recover.zeroed"]


@pytest.mark.parametrize("point", WRITING_POINTS)
def test_nothing_acknowledged_is_lost(point, tmp_path):
    with DataFolder.open(tmp_path) as data:
        folder = data.partition(1, 0)
        result = run(folder, f"{point}:2")
        assert result.returncode == -signal.SIGKILL, result.stderr.decode()
        before = verify_folder_unlocked(data)
        log = PartitionLog.open(folder, topic=1, partition=0, options=OPTIONS)
        assert before.ok and log.sequence_durable >= acknowledged(result)
        batches = list(log.scan(1))
        assert batches[-1].last == log.sequence_durable
        assert batches[-1].chain == log.chain_last
        snapshot = log.load_snapshot()
        assert snapshot is None or snapshot.sequence <= log.sequence_durable
        assert not list(folder.glob("*.seg.tmp"))
        log.close()


def verify_folder_unlocked(data):
    data.close()
    return verify_folder(data.path)


def test_a_crash_while_a_torn_tail_is_cleared_is_harmless(tmp_path):
    folder = tmp_path / "0000"
    result = run(folder, "log.write.torn:5")
    assert run(folder, "log.recover.zeroed:1").returncode == -signal.SIGKILL
    log = PartitionLog.open(folder, topic=1, partition=0, options=OPTIONS)
    assert log.sequence_durable >= acknowledged(result) > 0
    assert list(log.scan(1))[-1].last == log.sequence_durable


def test_an_unarmed_process_lives(tmp_path):
    result = run(tmp_path / "0000", "no.such.point:1")
    assert result.returncode == 0, result.stderr.decode()
    assert acknowledged(result) == 1200


def test_rot_is_still_refused_after_a_crash(tmp_path):
    folder = tmp_path / "0000"
    run(folder, "log.write.before:8")
    newest = max(folder.glob("*.seg"))
    data = bytearray(newest.read_bytes())
    data[64 + 32 + 80] ^= 1
    newest.write_bytes(data)
    with pytest.raises(Corruption):
        PartitionLog.open(folder, topic=1, partition=0, options=OPTIONS)
