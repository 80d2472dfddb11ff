"""`kill -9` while a sink writes: what was acknowledged is there, and nothing is there twice."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.conformance.sinks.changes import Triggers, held, opened
from tests.conformance.sinks.crashing import TRIGGERS, sink_of

from penstock.sinks.lake import LakeSink
from penstock.testing.redis import RedisProcess

ROOT = Path(__file__).parents[3]


def killed_after(lines: int, kind: str, where: str) -> int:
    """Let the writer acknowledge some triggers, kill it, and say which was the last."""
    command = [sys.executable, "-m", "tests.conformance.sinks.crashing", kind, where]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        last = [int(next(writer.stdout)) for _ in range(lines)][-1]
        writer.kill()
        return max([last, *(int(line) for line in writer.stdout if line.endswith("\n"))])


@pytest.mark.parametrize("kind", ["cache", "index", "lake"])
def test_a_killed_writer_goes_on_where_it_stopped(
    kind: str, tmp_path: Path, redis_server: RedisProcess
) -> None:
    where = redis_server.url if kind == "cache" else str(tmp_path / kind)
    with opened(sink_of(kind, where)) as sink:
        sink.reset()
    acknowledged = killed_after(2, kind, where)
    with opened(sink_of(kind, where)) as sink:
        found = {row[1]: row[2] for row in held(sink)}
        assert min(found.values()) >= acknowledged + 1
        assert set(found) == {"v0", "v1", "v2"}

    assert acknowledged + 3 < TRIGGERS
    triggers = Triggers.of(acknowledged + 4)
    with opened(sink_of(kind, where)) as sink:
        held_to = sink.cursor()
        for trigger in range(acknowledged if held_to is None else held_to + 1, acknowledged + 4):
            sink.write(triggers.work(trigger))
        assert {row[2] for row in held(sink)} == {acknowledged + 4}
        if isinstance(sink, LakeSink):
            numbers = [n for b in sink.history.batches(["ordinal"]) for n in b["ordinal"].tolist()]
            assert sorted(numbers) == list(range(1, 3 * (acknowledged + 4) + 1))
