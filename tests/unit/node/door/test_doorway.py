"""Who may be connected: strangers give way to newcomers, and no address has all the places."""

from __future__ import annotations

import pytest

from penstock.config import Limits
from penstock.errors import LimitExceeded
from penstock.node.door import doorway as module
from penstock.node.door.doorway import Doorway, address_of

FEW = Limits(
    connections_max=6,
    address_connections_max=4,
    strangers_max=8,
    address_strangers_max=4,
    strangers_bytes_max=1000,
)


class Caller:
    def __init__(self, address: str = "10.0.0.1", *, idle_s: float = 0.0) -> None:
        self.address, self._idle_s = address, idle_s
        self.expelled = False

    def idle_s(self) -> float:
        return self._idle_s

    def expel(self) -> None:
        self.expelled = True


@pytest.fixture
def doorway(monkeypatch: pytest.MonkeyPatch) -> Doorway:
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    return Doorway(FEW)


def entered(doorway: Doorway, count: int, address: str = "10.0.0.1") -> list[Caller]:
    callers = [Caller(address) for _ in range(count)]
    for caller in callers:
        doorway.enter(caller)
    return callers


def test_the_oldest_stranger_of_an_address_gives_way(doorway: Doorway) -> None:
    other = entered(doorway, 1, "10.0.0.2")
    callers = entered(doorway, 6)
    assert [caller.expelled for caller in callers] == [True, True, False, False, False, False]
    assert not other[0].expelled and doorway.strangers == 5


def test_the_oldest_of_all_gives_way(doorway: Doorway) -> None:
    callers = [entered(doorway, 1, f"10.0.0.{n}")[0] for n in range(10)]
    assert [caller.expelled for caller in callers] == [True, True] + [False] * 8


def test_a_newcomer_has_time_to_greet() -> None:
    doorway = Doorway(FEW)
    callers = entered(doorway, 8)
    assert not any(caller.expelled for caller in callers)
    entered(doorway, 1)
    assert callers[0].expelled  # there are twice as many as there may be


def test_who_is_admitted_is_no_stranger(doorway: Doorway) -> None:
    (first,) = entered(doorway, 1)
    doorway.admit(first)
    entered(doorway, 6)
    assert not first.expelled and (doorway.inside, doorway.strangers) == (1, 4)
    doorway.leave(first)
    assert doorway.inside == 0


def test_what_strangers_send_is_bounded(doorway: Doorway) -> None:
    first, second = entered(doorway, 2)
    doorway.hold(first, 600)
    doorway.hold(second, 300)
    doorway.hold(second, 500)
    assert first.expelled and not second.expelled


@pytest.mark.parametrize("addresses", [1, 2])
def test_past_the_last_place_the_idle_give_way(doorway: Doorway, addresses: int) -> None:
    idle = Caller(idle_s=60.0)
    busy = [Caller(f"10.0.0.{1 + n % addresses}") for n in range(3 if addresses == 1 else 5)]
    for caller in (idle, *busy):
        doorway.admit(caller)
    newcomer = Caller()
    doorway.admit(newcomer)
    assert idle.expelled and not any(caller.expelled for caller in busy)
    with pytest.raises(LimitExceeded) as refused:
        doorway.admit(Caller())
    assert refused.value.retry_after_s > 0


class Transport:
    def __init__(self, peer: object) -> None:
        self._peer = peer

    def get_extra_info(self, name: str) -> object:
        return self._peer if name == "peername" else None


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (None, ""),
        (("10.1.2.3", 99), "10.1.2.3"),
        (("::ffff:10.1.2.3", 99, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 99, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 99, 0, 0), "fe80::/64"),
    ],
)
def test_where_a_caller_is(peer: object, address: str) -> None:
    assert address_of(Transport(peer)) == address  # type: ignore[arg-type]
