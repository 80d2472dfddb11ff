import asyncio
from collections.abc import Iterator

import pytest

from penstock.cluster import repeating
from penstock.cluster.repeating import repeat
from penstock.errors import FailedPrecondition, PenstockError, StorageFailed, Unavailable


class Work:
    """Fails as it is told to, then waits for ever."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self._outcomes: Iterator[Exception | None] = iter(outcomes)
        self.through = asyncio.Event()

    async def __call__(self) -> None:
        for outcome in self._outcomes:
            if outcome is None:
                return
            raise outcome
        self.through.set()
        await asyncio.Event().wait()


async def through(*outcomes: Exception | None) -> None:
    """Until the work has come through all of them."""
    work = Work(*outcomes)
    running = asyncio.ensure_future(repeat(work, trouble="trouble", pause_s=0))
    async with asyncio.timeout(60):
        await work.through.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    "error", [Unavailable("away"), FailedPrecondition("refused"), ValueError()]
)
async def test_work_goes_on_whatever_it_fails_with(error: Exception) -> None:
    await through(error, error)


async def test_a_disk_that_failed_ends_it() -> None:
    with pytest.raises(StorageFailed):
        await repeat(Work(StorageFailed("broken")), trouble="trouble", pause_s=0)


async def test_trouble_that_lasts_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    await through(*[Unavailable("away")] * 5)
    assert [record.getMessage() for record in caplog.records] == ["trouble: away"]


async def test_trouble_is_told_again_after_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeating, "TELL_S", 0.0)
    await through(*[Unavailable("away")] * 3)
    assert len(caplog.records) == 3


@pytest.mark.parametrize("other", [None, FailedPrecondition("refused")])
async def test_new_trouble_is_told_at_once(
    caplog: pytest.LogCaptureFixture, other: PenstockError | None
) -> None:
    await through(Unavailable("away"), other, Unavailable("away again"))
    assert caplog.records[-1].getMessage() == "trouble: away again"


async def test_what_nobody_foresaw_is_told_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await through(ValueError("odd"))
    [record] = caplog.records
    assert record.levelname == "ERROR" and record.exc_info is not None
