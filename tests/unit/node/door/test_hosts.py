"""Which names a listener answers to."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidArgument, Misdirected
from penstock.node.door.doorway import REMEMBERED_MAX, HostNames

ON_LOOPBACK = HostNames("127.0.0.1", names=("Queue.example",))
EXPOSED = HostNames("0.0.0.0", names=("fd00::7",))


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LocalHost:80", "localhost.", "127.0.0.1", "127.0.0.1:7442", "127.9.9.9",
        "[::1]", "[::1]:7442", "queue.example", "QUEUE.example.:1",
    ],
)  # fmt: skip
def test_a_listener_on_loopback_has_the_names_of_loopback(host: str) -> None:
    ON_LOOPBACK.check(host.encode())


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example", "rebound.example:7442", "10.0.0.1", "0.0.0.0", "127.0.0.1.evil.example",
        "localhost.evil.example", "x.localhost", "127.1", "2130706433", "0x7f.1",
    ],
)  # fmt: skip
def test_other_names_are_misdirected(host: str) -> None:
    with pytest.raises(Misdirected) as refused:
        ON_LOOPBACK.check(host.encode())
    assert refused.value.details["host"] == host


def test_a_listener_that_others_reach_takes_addresses_and_no_names() -> None:
    for host in (b"10.0.0.1:7442", b"[fd00::8]:7442", b"192.0.2.1", b"localhost"):
        EXPOSED.check(host)
    with pytest.raises(Misdirected):
        EXPOSED.check(b"rebound.example")


@pytest.mark.parametrize("host", [None, b"", b"a b", b"a:b", b"[::1", b"h\xc3\xb6st", b"a:99999"])
def test_what_is_no_host_is_refused(host: bytes | None) -> None:
    with pytest.raises(InvalidArgument) as refused:
        ON_LOOPBACK.check(host)
    assert refused.value.field == "host"


def test_many_names_are_not_all_remembered() -> None:
    for number in range(2 * REMEMBERED_MAX):
        with pytest.raises(Misdirected):
            ON_LOOPBACK.check(b"h%d.example" % number)
    assert ON_LOOPBACK._admits.cache_info().currsize <= REMEMBERED_MAX
