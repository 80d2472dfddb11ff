"""The fixtures as a user's own test suite sees them, in a pytest process of its own."""

import pytest

pytest_plugins = ["pytester"]

INI = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
"""

USERS_TESTS = """
import pytest


async def test_a_client_talks_to_a_real_node_on_disk(penstock_client, penstock_node, tmp_path):
    jobs = penstock_client.topic("jobs", of=str)
    await jobs.put("later", priority=9)
    await jobs.put("first", priority=1)
    (message,) = await jobs.pop()
    assert message.value == "first"
    await message.ack()
    assert list((tmp_path / "penstock-data").rglob("*.seg"))
    assert set(penstock_node.engine.topics) == {"jobs"}


async def test_a_delay_passes_when_the_clock_is_advanced(penstock_topic, penstock_clock):
    jobs = penstock_topic(of=str)
    await jobs.put("tomorrow", delay=24 * 3600)
    penstock_clock.advance(24 * 3600 - 1)
    assert await jobs.pop() == []
    penstock_clock.advance(1)
    (message,) = await jobs.pop(wait=60)
    assert message.value == "tomorrow"


async def test_a_lease_expires_when_the_clock_is_advanced(penstock_topic, penstock_clock):
    jobs = penstock_topic(of=str, visibility_ms=60_000, backoff_ms_base=0)
    await jobs.put("work")
    await jobs.pop()
    assert await jobs.pop() == []
    penstock_clock.advance(61)
    (again,) = await jobs.pop(wait=60)
    assert again.attempts == 1


def test_the_same_without_async(penstock_sync_client, penstock_clock):
    jobs = penstock_sync_client.topic("jobs", of=str)
    jobs.put("tomorrow", delay=24 * 3600)
    assert jobs.pop() == []
    penstock_clock.advance(24 * 3600)
    (message,) = jobs.pop(wait=60)
    assert message.value == "tomorrow"


@pytest.mark.parametrize("turn", [1, 2])
async def test_every_test_has_a_node_of_its_own(penstock_client, penstock_topic, turn):
    assert await penstock_client.topics() == []
    await penstock_topic(mode="max").opened()
    await penstock_topic().opened()
    assert len(await penstock_client.topics()) == 2
"""

IDLE = """
import sys

def test_idle():
    assert "numpy" not in sys.modules
    assert "penstock.node" not in sys.modules
"""


def passes(pytester: pytest.Pytester, code: str, *, tests: int) -> None:
    pytester.makeini(INI)
    pytester.makepyfile(code)
    pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider").assert_outcomes(passed=tests)


def test_the_fixtures_serve_a_user_s_tests(pytester: pytest.Pytester) -> None:
    passes(pytester, USERS_TESTS, tests=6)


def test_the_plugin_loads_nothing_until_it_is_used(pytester: pytest.Pytester) -> None:
    passes(pytester, IDLE, tests=1)
