import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from tests.unit.cluster.lines import QUICK, Line, OpenEtcd

from penstock.cluster.etcd import EtcdStore
from penstock.cluster.membership import Membership, NodeInfo
from penstock.errors import AlreadyExists, FailedPrecondition
from penstock.testing.etcd import EtcdProcess

Spawn = Callable[[Awaitable[None]], asyncio.Future[None]]
TTL_S = QUICK.lease_ttl_s

NODE = """
import asyncio, sys
from penstock.cluster.etcd import EtcdStore
from penstock.cluster.membership import Membership, NodeInfo

async def main():
    async def allowed(): pass
    store = EtcdStore([sys.argv[1]], prefix=sys.argv[2])
    members = Membership(store, lease_ttl_s=2, before_return=allowed, on_change=lambda: None)
    await members.join(NodeInfo(id="other", uuid="u", host="h", native_port=1))
    print("joined", flush=True)
    await members.run()

asyncio.run(main())
"""


def info(id: str, **fields: object) -> NodeInfo:
    return NodeInfo(**{"id": id, "uuid": f"uuid-{id}", "host": "h", "native_port": 1} | fields)


class News:
    """Tells who waits for it that something has changed."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def __call__(self) -> None:
        self.event.set()


async def _allowed() -> None:
    return


def member(store: EtcdStore, *, lease_ttl_s: int = TTL_S) -> Membership:
    return Membership(store, lease_ttl_s=lease_ttl_s, before_return=_allowed, on_change=News())


async def until(members: Membership, condition: Callable[[], bool]) -> None:
    """Wait for changes until it is so."""
    news = members._on_change.event
    async with asyncio.timeout(60):
        while not condition():
            news.clear()
            await news.wait()


@pytest.fixture
async def here(open_etcd: OpenEtcd, spawn: Spawn) -> Membership:
    """One that is not lost, however busy the machine is."""
    members = member(open_etcd(), lease_ttl_s=30)
    await members.join(info("here"))
    spawn(members.run())
    return members


async def test_members_see_each_other_come_and_go(here: Membership, open_etcd: OpenEtcd) -> None:
    there = member(open_etcd())
    await there.join(info("there", zone="z"))
    assert list(there.alive) == ["here", "there"]
    await until(here, lambda: here.alive.get("there") == info("there", zone="z"))
    assert here.ages["here"] < here.ages["there"]
    await there.leave()
    await until(here, lambda: list(here.alive) == ["here"])


async def test_a_killed_process_is_missed_when_its_lease_ends(
    here: Membership, etcd: EtcdProcess, open_etcd: OpenEtcd
) -> None:
    command = [sys.executable, "-c", NODE, etcd.endpoint, open_etcd().prefix]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        await until(here, lambda: "other" in here.alive)
        process.kill()
        await until(here, lambda: "other" not in here.alive)
    finally:
        process.kill()
        process.communicate()
    assert "here" in here.alive


async def test_who_was_taken_for_dead_registers_again(
    here: Membership, open_etcd: OpenEtcd
) -> None:
    age = here.ages["here"]
    await open_etcd().revoke(here._lease)
    await until(here, lambda: here.ages.get("here", 0) > age)
    assert here.alive == {"here": info("here")}


async def test_an_entry_that_was_deleted_comes_back_once(
    here: Membership, open_etcd: OpenEtcd
) -> None:
    store, age = open_etcd(), here.ages["here"]
    await store.delete("nodes/here")
    await until(here, lambda: here.ages.get("here", 0) > age)
    age = here.ages["here"]
    await asyncio.sleep(TTL_S / 2)
    assert here.ages == {"here": age}


async def test_a_member_that_was_cut_off_comes_back(
    here: Membership, line: Line, far_store: EtcdStore, spawn: Spawn
) -> None:
    far = member(far_store)
    await far.join(info("far"))
    spawn(far.run())
    age = far.ages["far"]
    await until(here, lambda: "far" in here.alive)
    await line.cut()
    await until(here, lambda: "far" not in here.alive)
    assert sorted(far.alive) == ["far", "here"]  # it goes by what it knew
    await line.mend()
    await until(here, lambda: here.ages.get("far", 0) > age)
    await until(far, lambda: far.ages == here.ages)


async def test_who_has_left_does_not_come_back(open_etcd: OpenEtcd, spawn: Spawn) -> None:
    store, members = open_etcd(), member(open_etcd())
    await members.join(info("a"))
    spawn(members.run())
    await members.leave()
    await until(members, lambda: members.alive == {})
    await asyncio.sleep(TTL_S / 2)  # it would have kept its lease alive by now
    assert await store.range("nodes/") == []


async def test_a_restarted_node_is_new(here: Membership, open_etcd: OpenEtcd) -> None:
    killed, again = member(open_etcd()), member(open_etcd())
    await killed.join(info("other"))
    await again.join(info("other", started_ms=1))
    assert again.ages["other"] > killed.ages["other"]
    await until(here, lambda: here.alive.get("other") == info("other", started_ms=1))


async def test_an_id_belongs_to_one_node_as_long_as_it_lives(
    here: Membership, open_etcd: OpenEtcd
) -> None:
    stranger, age = member(open_etcd()), here.ages["here"]
    with pytest.raises(AlreadyExists):  # after twice the time of a lease
        await stranger.join(info("here", uuid="another"))
    assert here.alive == {"here": info("here")} and here.ages == {"here": age}


async def test_a_dead_nodes_id_is_free_again(open_etcd: OpenEtcd) -> None:
    dead, heir = member(open_etcd()), member(open_etcd())
    await dead.join(info("a"))
    await heir.join(info("a", uuid="another"))
    assert heir.alive["a"].uuid == "another"


async def test_an_update_keeps_the_age(here: Membership, open_etcd: OpenEtcd) -> None:
    age = here.ages["here"]
    await here.set_draining(True)
    assert here.alive["here"].draining and here.ages["here"] == age
    await open_etcd().revoke(here._lease)
    await until(here, lambda: here.ages.get("here", 0) > age)
    assert here.alive["here"].draining
    with pytest.raises(FailedPrecondition):
        await member(open_etcd()).set_draining(True)


def test_the_json_can_grow() -> None:
    value = b'{"id":"a","uuid":"u","host":"h","native_port":1,"colour":"red"}'
    assert msgspec.json.decode(value, type=NodeInfo).zone == ""
