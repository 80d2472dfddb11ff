import asyncio
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import structlog

from penstock.node.observe import logs

Lines = Callable[[], list[dict[str, Any]]]
KEY = "pk_abcdefgh23_" + "0f" * 32


@pytest.fixture
def written() -> Iterator[Lines]:
    """What the process logs while the test runs."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("info", stream=stream)
    yield lambda: [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_is_an_object(written: Lines) -> None:
    logs.get_logger("penstock.test").info("topic created", topic="jobs", name="x", partitions=4)
    (line,) = written()
    assert list(line)[:4] == ["time", "level", "logger", "event"]
    assert line["event"] == "topic created" and line["level"] == "info"
    assert (line["topic"], line["name"], line["partitions"]) == ("jobs", "x", 4)
    assert line["logger"] == "penstock.test" and line["time"].endswith("Z")


def test_the_level_decides(written: Lines) -> None:
    log = logs.get_logger("penstock.test")
    log.debug("quiet")
    log.warning("loud")
    assert [line["event"] for line in written()] == ["loud"]


def test_other_libraries_are_written_alike(written: Lines) -> None:
    logging.getLogger("uvicorn.error").warning("took %d ms", 7)
    structlog.get_logger("elsewhere").info("hello", n=1)
    first, second = written()
    assert (first["event"], first["level"], first["logger"]) == (
        "took 7 ms",
        "warning",
        "uvicorn.error",
    )
    assert (second["event"], second["n"]) == ("hello", 1)


def test_a_request_s_lines_carry_its_id(written: Lines) -> None:
    log = logs.get_logger("penstock.test")
    with logs.request("abc-1") as id:
        log.info("inside")
        logging.getLogger("other").warning("inside too")
    log.info("outside")
    assert id == "abc-1"
    assert [line.get("request_id") for line in written()] == ["abc-1", "abc-1", None]


@pytest.mark.parametrize("id", [None, "", "a b", "x" * 65, 'a"}\n', "é"])
def test_a_bad_request_id_is_replaced(id: str | None) -> None:
    with logs.request(id) as chosen:
        assert chosen != id
        assert len(chosen) == 16


async def test_requests_at_once_do_not_mix() -> None:
    async def handle(id: str) -> str:
        with logs.request(id):
            await asyncio.sleep(0)
            return logs.request_id.get()

    assert await asyncio.gather(*map(handle, "abc")) == ["a", "b", "c"]
    assert logs.request_id.get() == ""


def test_payloads_and_secrets_stay_out(written: Lines) -> None:
    logs.get_logger("penstock.test").info(
        "enqueue",
        payload=b"private",
        headers={"x": "private"},
        Authorization="Bearer private",
        entry={"key": "private", "size": 7, "blobs": [b"private", (b"private",)]},
        other=memoryview(b"private"),
        key_id="abc",
    )
    (line,) = written()
    assert "private" not in str(line)
    assert line["payload"] == "[redacted 7 bytes]"
    assert line["entry"]["size"] == 7
    assert line["key_id"] == "abc"


def test_a_key_in_a_text_loses_its_secret(written: Lines) -> None:
    log = logs.get_logger("penstock.test")
    logging.getLogger("other").warning("got %s", KEY)
    log.info("url", url=f"https://host/?api_key={KEY}&x=1", nested=[{"deep": KEY}])
    try:
        raise ValueError(f"bad key {KEY}")
    except ValueError:
        log.exception("failed")
    assert len(written()) == 3
    assert "0f0f" not in str(written())
    assert "pk_abcdefgh23_[redacted]" in written()[2]["exception"]
    assert "ValueError" in written()[2]["exception"]


def test_nesting_is_bounded(written: Lines) -> None:
    nested: list[Any] = []
    nested.append(nested)
    logs.get_logger("penstock.test").info("loop", nested=nested)
    assert "nested too deep" in str(written()[0])


def test_any_object_can_be_logged(written: Lines) -> None:
    logs.get_logger("penstock.test").info("odd", error=ValueError("x"), kind=int)
    (line,) = written()
    assert line["error"] == "ValueError('x')" and line["kind"] == "<class 'int'>"


def test_nothing_is_configured_by_importing(capfd: pytest.CaptureFixture[str]) -> None:
    logs.get_logger("penstock.test").info("embedded nodes are silent")
    assert capfd.readouterr() == ("", "")
