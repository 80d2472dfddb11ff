"""The sinks that the live path is measured with."""

from pathlib import Path

import pytest

from penstock.bench.live.sinks import STAMP, GatedIndex, NullSink
from penstock.errors import Unavailable
from penstock.sinks.protocol import Work


@pytest.mark.parametrize("kind", [NullSink, GatedIndex])
def test_a_sink_opens_with_its_gate(tmp_path: Path, kind: type[NullSink | GatedIndex]) -> None:
    gate = tmp_path / "gate"
    sink = kind("sink", gate=str(gate))
    with pytest.raises(Unavailable):
        sink.open()
    gate.touch()
    sink.open()
    sink.close()


def test_a_stamp_is_there_when_the_write_returns(tmp_path: Path) -> None:
    stamps = tmp_path / "stamps"
    sink = NullSink("sink", stamps=str(stamps))
    sink.open()
    for last, committed_at in ((5, 0.25), (7, None), (9, 1.5)):
        sink.write(Work(pipeline="p", first=last, last=last, committed_at=committed_at))
    assert list(STAMP.iter_unpack(stamps.read_bytes())) == [(5, 0.25), (9, 1.5)]
    sink.close()
