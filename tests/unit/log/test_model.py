"""The log against a list, through appends, flushes, crashes, damage and upkeep."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.log.files import Mark
from penstock.log.flush import LogOptions
from penstock.log.partition import PartitionLog
from penstock.model.batch import SCHEMAS, Batch, Kind, seal

OPTIONS = LogOptions(
    segment_bytes=4096, allocate_bytes=1024, reserve_bytes=0, cache_bytes=4096, index_bytes=512,
    floor_s=0,
)  # fmt: skip


class LogAgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="penstock-log-"))
        self.batches: list[Batch] = []  # durable and not dropped
        self.staged: list[Batch] = []
        self.open()

    def open(self) -> None:
        folder = self.root / "0000"
        self.log = PartitionLog.open(folder, topic=1, partition=0, options=OPTIONS)

    @rule(payloads=st.lists(st.binary(max_size=300), min_size=1, max_size=5), epoch=st.booleans())
    def stage(self, payloads: list[bytes], epoch: bool) -> None:
        log = self.log
        body = SCHEMAS[Kind.ENQ].encode(len(payloads), {"payload": payloads})
        batch = seal(
            Kind.ENQ, body, topic=1, partition=0, epoch=log.epoch_last + epoch,
            epoch_previous=log.epoch_last, first=log.sequence_last + 1, count=len(payloads),
            time_ms=len(self.batches), chain_previous=log.chain_last,
        )  # fmt: skip
        if log.room(True) < batch.size:
            log.grow(batch.size)
        log.stage(batch)
        self.staged.append(batch)

    @precondition(lambda self: self.staged)
    @rule()
    def flush(self) -> None:
        assert self.log.write(self.log.take()) == self.staged[-1].last
        self.batches += self.staged
        self.staged = []

    @rule(share=st.floats(0, 1))
    def commit(self, share: float) -> None:
        """Some of what is durable, or more than that: others may have it."""
        span = self.log.sequence_last - self.log.sequence_committed
        self.log.advance_commit(self.log.sequence_committed + int(span * share))

    @precondition(lambda self: not self.log.seeding)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """Another coordinator has other batches behind some end that is not committed."""
        ends = [
            b.last for b in (*self.batches, *self.staged) if b.last >= self.log.sequence_committed
        ]
        if not self.log.sequence_committed:
            ends.append(0)
        if not ends:
            return
        end = data.draw(st.sampled_from(ends))
        self.log.truncate(end)
        self.batches = [b for b in (*self.batches, *self.staged) if b.last <= end]
        self.staged = []
        assert self.log.sequence_last == self.log.sequence_durable == end

    @precondition(lambda self: len(self.batches) > 8)
    @rule(first=st.integers(1, 1000), finish=st.booleans())
    def reset(self, first: int, finish: bool) -> None:
        self.log.reset(first=first, chain=first * 7, epoch=0)
        self.batches, self.staged = [], []
        if finish:
            self.log.finish_seeding()

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        if clean:
            self.log.close()
        self.staged = []
        self.open()

    @precondition(lambda self: self.staged)
    @rule(share=st.floats(0, 1))
    def tear(self, share: float) -> None:
        """Power fails while the staged batches are on their way: some prefix is on disk."""
        piece = self.log.take().pieces[0]
        if piece.spare is None:
            mark = Mark(piece.size, self.log.sequence_durable, piece.first, piece.batches)
            piece.buffers[0] = mark.encode(piece.segment.header, piece.offset)
            whole = b"".join(piece.buffers)
            with piece.segment.path.open("r+b") as file:
                file.seek(piece.offset)
                file.write(whole[: int(len(whole) * share)])
        self.open()
        self.batches += [b for b in self.staged if b.last <= self.log.sequence_durable]
        self.staged = []

    @rule(at=st.floats(0, 1))
    def drop(self, at: float) -> None:
        self.log.drop_before(int(self.log.sequence_committed * at))
        self.batches = [b for b in self.batches if b.last >= self.log.sequence_first]

    @rule(data=st.data())
    def rewrite(self, data: st.DataObject) -> None:
        """Compact the oldest sealed segment that was not, keeping every second batch."""
        found = [i for i in self.log.segments() if i.sealed and not i.compacted]
        found = [i for i in found if i.last <= self.log.sequence_committed]
        if not found:
            return
        info = found[0]
        inside = [b for b in self.batches if info.first <= b.first <= info.last]
        keep = {b.first for b in data.draw(st.lists(st.sampled_from(inside), unique_by=id))}
        alive = [s for b in inside if b.first in keep for s in range(b.first, b.last + 1)]
        if self.log.rewrite(info.first, lambda *_: np.array(alive, np.uint64)):
            self.batches = [b for b in self.batches if b not in inside or b.first in keep]

    @invariant()
    def scan_equals_list(self) -> None:
        found = list(self.log.reader.scan(1))
        whole = [batch.encode() for batch in found if batch.entries and not batch.compacted]
        assert whole == [batch.encode() for batch in self.batches]
        expected = self.log.sequence_first
        for batch in found:
            assert batch.first == expected
            expected = batch.last + 1
        assert expected == self.log.sequence_durable + 1

    @invariant()
    def reads_equal_list(self) -> None:
        for batch in self.batches[:: max(1, len(self.batches) // 4)]:
            found = self.log.reader.read(batch.last, nowait=False)
            assert found is not None and found.encode() == batch.encode()

    @invariant()
    def staged_reads_equal_list(self) -> None:
        at = self.log.sequence_durable + 1
        found = self.log.reader.read_slice(
            at, through=1 << 40, bytes_max=1 << 30, nowait=True, staged=True
        )
        assert found is not None
        assert [b.encode() for b in found] == [b.encode() for b in self.staged]

    @invariant()
    def runs_equal_list(self) -> None:
        runs: list[tuple[int, int]] = []
        for batch in self.log.reader.scan(1):
            if not runs or runs[-1][0] != batch.epoch:
                runs.append((batch.epoch, batch.first))
        assert self.log.reader.epoch_runs(1) == runs

    @invariant()
    def the_floor_is_committed(self) -> None:
        assert self.log._writer.floor.slot.sequence <= self.log.sequence_committed
        assert self.log.sequence_committed <= self.log.sequence_last

    def teardown(self) -> None:
        shutil.rmtree(self.root)


LogAgainstList.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestLogAgainstList = LogAgainstList.TestCase
