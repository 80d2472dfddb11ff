"""The parts of the benchmark that need no server."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.document import Measurement, median_of
from penstock.bench.live.load import on_schedule
from penstock.bench.live.stages import check_timed
from penstock.bench.live.subscriber import STAMP, Arrival, since_commit
from penstock.bench.queue.gateway import post_many, request_bytes
from penstock.bench.report import number, view_of
from penstock.bench.runner import StageSet, Subject, each_run, measure
from penstock.bench.stages import Run, Values, at_once, payloads
from penstock.bench.subjects import SUBJECTS
from penstock.bench.targets import QUEUE_METRICS, Metric, offered
from penstock.console import console
from penstock.errors import Unavailable


@pytest.mark.parametrize(("name", "metrics"), [("queue", 11), ("cluster", 7), ("live", 46)])
async def test_every_metric_has_a_stage_that_runs(name: str, metrics: int, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    async with subject.prepare(Run(folder=tmp_path)) as prepared:
        assert set(subject.names) == set(prepared.stages)
    assert len({metric.name for metric in subject.metrics}) == len(subject.metrics) == metrics


async def test_stages_are_run_in_folders_of_their_own(tmp_path: Path) -> None:
    folders: list[Path] = []

    async def stage(run: Run) -> Values:
        folders.append(run.folder)
        (run.folder / "data").mkdir()
        return {"a": float(len(folders))}

    prepared = StageSet({"one": each_run(stage), "two": each_run(stage)}, {"size": 7})
    subject = Subject((_bounded("a", 1.0),), lambda run: nullcontext(prepared))
    document = await measure(subject, ["one"], runs=3, quick=True, folder=tmp_path)
    assert document["a"] == 2.0
    assert document["settings"] == {"runs": 3, "quick": True, "size": 7}
    assert len(set(folders)) == 3
    assert list(tmp_path.iterdir()) == []


async def test_work_is_done_once_and_some_of_it_at_a_time() -> None:
    under_way, most, done = 0, 0, []

    async def work(turn: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        done.append(turn)

    await at_once(3, 10, work)
    assert sorted(done) == list(range(10))
    assert most == 3


@pytest.mark.parametrize(
    ("written", "timed", "behind"), [(99, 99, 0), (100, 99, 0), (101, 101, 0), (100, 100, 1)]
)
def test_a_sink_that_did_not_get_all_of_it_live_was_not_measured(
    written: int, timed: int, behind: int
) -> None:
    def sink(written: int, timed: int, behind: int) -> dict[str, object]:
        timings = {"written": {"count": timed}}
        return {"written": written, "timings": timings, "behind_switches": behind}

    check_timed(sink(100, 100, 0), put=100)
    with pytest.raises(Unavailable, match=f"of 100 changes the sink has written {written}"):
        check_timed(sink(written, timed, behind), put=100)


def test_an_arrival_counts_from_the_commit_that_covers_it() -> None:
    stamps = np.array([(10, 1.0), (12, 2.0)], STAMP)
    arrivals = [Arrival(1.5, 9), Arrival(1.5, 10), Arrival(2.25, 11), Arrival(2.25, 12)]
    assert since_commit(arrivals, stamps).tolist() == [0.5, 0.5, 0.25, 0.25]
    with pytest.raises(Unavailable, match="not stamped"):
        since_commit([Arrival(3.0, 13)], stamps)


def test_a_target_is_a_bound_in_the_right_direction() -> None:
    by_name = {metric.name: metric for metric in QUEUE_METRICS}
    assert by_name["enqueue_batch100_per_s"].met(200_000)
    assert not by_name["enqueue_batch100_per_s"].met(199_999)
    assert by_name["end_to_end_ms_p50"].met(3)
    assert not by_name["end_to_end_ms_p50"].met(3.1)


def test_medians_are_taken_value_by_value() -> None:
    rows = [{"a": 1.0, "b": 9.0}, {"a": 5.0, "b": 7.0}, {"a": 3.0, "b": 8.0}]
    assert median_of(rows) == {"a": 3.0, "b": 8.0}


def test_a_target_that_was_not_measured_is_missed(tmp_path: Path) -> None:
    made = Measurement(tmp_path, {}, datetime.now(UTC))
    target, other = _bounded("a", 1.0), _bounded("c", 1.0, stage="other")
    whole = made.document({"one": [{"a": 2.0}]}, (target, other), {})
    assert whole["ok"]
    assert whole["missing"] == []  # the other stage was not asked for
    told = Metric("b", "one", "", None)
    part = made.document({"one": [{"a": 2.0}]}, (target, told), {})
    assert part["ok"]
    assert part["missing"] == ["b"]  # nobody promised anything, and yet it is said
    assert not made.document({"one": [{"b": 2.0}]}, (target, told), {})["ok"]
    assert not made.document({"one": []}, (target,), {})["ok"]


def test_a_value_that_one_run_lacks_is_missing(tmp_path: Path) -> None:
    made = Measurement(tmp_path, {}, datetime.now(UTC))
    for rows in ([{"a": 2.0}, {}], [{}, {"a": 2.0}]):
        document = made.document({"one": rows}, (_bounded("a", 1.0),), {})
        assert document["missing"] == ["a"]
        assert not document["ok"]


def test_of_a_load_the_worst_run_counts(tmp_path: Path) -> None:
    made = Measurement(tmp_path, {}, datetime.now(UTC))
    load, plain = offered("one", 100), _bounded("a", 95.0)
    rows = [{"one_offered_per_s": rate, "a": rate} for rate in (100.0, 100.0, 94.9)]
    document = made.document({"one": rows}, (load, plain), {})
    assert (document["one_offered_per_s"], document["a"]) == (94.9, 100.0)
    assert not document["ok"]
    assert made.document({"one": rows[:2]}, (load, plain), {})["ok"]


async def test_the_load_is_what_was_answered_and_not_what_was_meant() -> None:
    """A thousand per second are meant, and the last of twenty is answered late."""
    dues: list[float] = []

    async def put(number: int, due: float) -> None:
        dues.append(due)
        if number == 19:
            await asyncio.sleep(0.1)  # what a node takes that does not keep up

    began = time.perf_counter()
    per_s = await on_schedule(put, tick_s=0.001, count=20)
    ended = time.perf_counter()
    assert np.allclose(np.diff(dues), 0.001)
    assert 20 / (ended - began) <= per_s <= 20 / 0.1


def _bounded(name: str, target: float, *, stage: str = "one") -> Metric:
    return Metric(name, stage, "", target)


def test_payloads_differ_and_have_the_right_size() -> None:
    made = payloads(50)
    assert {len(payload) for payload in made} == {200}
    assert len(set(made)) == 50


def test_a_quick_run_does_whole_batches(tmp_path: Path) -> None:
    assert Run(folder=tmp_path, scale=0.1).count(12_345) == 1200
    assert Run(folder=tmp_path, scale=0.0001).count(1000) == 100


def test_the_table_says_what_was_met(capsys: pytest.CaptureFixture[str]) -> None:
    document = {
        "enqueue_batch100_per_s": 250_000.0, "end_to_end_ms_p95": 21.5, "took_s": 3,
        "settings": {"runs": 3, "quick": False},
        "machine": {"cores": 2, "cpu": "cpu", "load_1m": 0.1, "fsync": "1 ms"},
    }  # fmt: skip
    document["missing"] = ["put_single_per_s"]
    console().print(view_of(document, QUEUE_METRICS, what="queue"))
    printed = capsys.readouterr().out
    assert "250\u202f000" in printed
    assert "missed" in printed
    assert re.search(r"put_single_per_s.*not measured", printed)
    assert number(21.5) == "21.5"


@asynccontextmanager
async def http_server(status: str) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that answers in two pieces; its url, and the requests on each connection."""
    handlers: list[asyncio.Task[None]] = []
    served: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())  # type: ignore[arg-type]
        place = len(served)
        served.append(0)
        with suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(5)
                served[place] += 1
                writer.write(f"HTTP/1.1 {status}\r\nConte".encode())
                await writer.drain()
                writer.write(b"nt-Length: 2\r\n\r\nok")
        writer.close()
        with suppress(ConnectionResetError):
            await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", served
        await asyncio.gather(*handlers)


@pytest.mark.parametrize("depth", [1, 3])
async def test_http_load_counts_every_answer(depth: int) -> None:
    async with http_server("200 OK") as (url, served):
        request = request_bytes(url, "/v1/enqueue", b"hello")
        await post_many(url, request, count=25, connections=4, depth=depth)
        assert sorted(served) == [6, 6, 6, 7]


async def test_http_load_stops_at_the_first_refusal() -> None:
    async with http_server("503 Busy") as (url, _):
        with pytest.raises(Unavailable, match="503"):
            await post_many(url, request_bytes(url, "/", b"hello"), count=5, connections=1)
