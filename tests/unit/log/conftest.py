"""A log with a pen: builds batches that follow each other, and writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.log.flush import LogOptions
from penstock.log.partition import PartitionLog
from penstock.model.batch import SCHEMAS, Batch, Kind, seal

TINY = LogOptions(segment_bytes=2048, allocate_bytes=1024, reserve_bytes=0)
SMALL = LogOptions(segment_bytes=64 << 10, allocate_bytes=16 << 10, reserve_bytes=0)


class Pen:
    """Writes to one log; `batches` is what was ever made durable by it."""

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.time_ms = 1_700_000_000_000
        self.batches: list[Batch] = []

    def batch(self, payloads: Sequence[bytes], *, kind: Kind = Kind.ENQ, epoch: int = 1) -> Batch:
        log = self.log
        if kind is Kind.ENQ:
            columns = {"priority": list(range(len(payloads))), "payload": list(payloads)}
        else:
            columns = {"token": list(range(1, len(payloads) + 1))}
        body = SCHEMAS[kind].encode(len(payloads), columns)
        return seal(
            kind, body, topic=log.topic, partition=log.partition, epoch=epoch,
            epoch_previous=log.epoch_last, first=log.sequence_last + 1, count=len(payloads),
            time_ms=self.time_ms, chain_previous=log.chain_last,
        )  # fmt: skip

    def stage(self, payloads: Sequence[bytes], *, kind: Kind = Kind.ENQ, epoch: int = 1) -> Batch:
        batch = self.batch(payloads, kind=kind, epoch=epoch)
        if self.log.room(True) < batch.size:
            self.log.grow(batch.size)
        self.log.stage(batch)
        self.batches.append(batch)
        return batch

    def flush(self) -> None:
        flush = self.log.take()
        if flush is not None:
            self.log.advance_commit(self.log.write(flush))

    def put(self, *payloads: bytes, kind: Kind = Kind.ENQ, epoch: int = 1) -> Batch:
        batch = self.stage(payloads, kind=kind, epoch=epoch)
        self.flush()
        return batch

    def fill(self, segments: int) -> None:
        """Write until that many segments are sealed."""
        while sum(s.sealed for s in self.log.segments()) < segments:
            self.put(b"%d" % self.log.sequence_last * 20, b"second")


Open = Callable[..., PartitionLog]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "0003"


@pytest.fixture
def open_log(folder: Path) -> Open:
    """Opens the log in `folder`; without `close`, a log is left as a crash leaves it."""

    def open_log(options: LogOptions = TINY, *, accept_rot: bool = False) -> PartitionLog:
        return PartitionLog.open(
            folder, topic=7, partition=3, options=options, accept_rot=accept_rot
        )

    return open_log


@pytest.fixture
def pen(open_log: Open) -> Pen:
    return Pen(open_log())


@pytest.fixture
def pen_on() -> Callable[[PartitionLog], Pen]:
    return Pen
