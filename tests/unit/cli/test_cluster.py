"""What `penstock cluster` draws and decides, out of what a node answers."""

import io
from typing import Any

import pytest
from rich.console import Console

from penstock.cli import cluster
from penstock.cli.cluster import copied, partition_of, pending, table_of, view_of_up, watch
from penstock.cli.cluster_status import (
    PARTITIONS_SHOWN,
    of_topic,
    troubles,
    unsettled,
    view_of,
    warnings,
)
from penstock.errors import NotFound, Unavailable


def follower(node: str, **changes: Any) -> dict[str, Any]:
    return {
        "node": node, "connected": True, "counts": True, "sequence": 1200, "lag": 0,
        "lagging": False, "credits": 1000, "credits_max": 1000, "credit_bytes": 8 << 20,
        "credit_bytes_max": 8 << 20, "copying": None,
    } | changes  # fmt: skip


def part(number: int, coordinator: str = "n1", **changes: Any) -> dict[str, Any]:
    others = [name for name in ("n1", "n2", "n3") if name != coordinator]
    return {
        "topic": "jobs", "partition": number, "state": "serving", "epoch": 3 + number,
        "coordinator": coordinator, "voters": ["n1", "n2", "n3"], "joint": [], "learners": [],
        "target": [], "sequence_last": 1200, "sequence_committed": 1200,
        "followers": [follower(name) for name in others],
    } | changes  # fmt: skip


def node(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": name, "address": f"10.0.0.{name[1:]}:7440", "zone": "a", "version": "0.1.0",
        "alive": True, "reachable": True, "rolled_back": False, "draining": False, "age": 12,
        "started_ms": 1_700_000_000_000, "coordinators": 1, "replicas": 3,
    } | changes  # fmt: skip


def status(*parts: dict[str, Any], nodes: Any = None, available: bool = True) -> dict[str, Any]:
    return {
        "cluster": "penstock", "node": "n1", "policy": "balanced",
        "metadata": {"kind": "etcd", "endpoints": ["127.0.0.1:2379"], "available": available},
        "nodes": nodes or [node("n1"), node("n2"), node("n3")], "partitions": list(parts),
    }  # fmt: skip


def drawn(found: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(found)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def row_of(text: str, number: int) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [str(number)])


def test_the_drawing_shows_who_coordinates_and_who_follows() -> None:
    text = drawn(view_of(status(part(0), part(1, "n3"), part(2, "n2"))))
    assert "3 of 3 nodes, 3 of 3 partitions served, etcd up" in text
    assert row_of(text, 0)[1:5] == ["★", "●", "●", "3"]
    assert row_of(text, 1)[1:5] == ["●", "●", "★", "4"]
    assert "100%" in text and "10.0.0.3:7440" in text and "is behind" in text


def test_a_slow_a_lost_and_a_learning_replica_look_different() -> None:
    slow = part(0, followers=[follower("n2", lag=900, credits=150), follower("n3")])
    lost = part(1, followers=[follower("n2"), follower("n3", connected=False, lag=70, credits=0)])
    learning = part(2, voters=["n1", "n2"], learners=["n3"], target=["n1", "n3"])
    text = drawn(view_of(status(slow, lost, learning)))
    assert row_of(text, 0)[1:4] == ["★", "◐", "●"] and "15%" in text
    assert row_of(text, 1)[1:4] == ["★", "●", "○"]
    assert row_of(text, 1)[-3] == "70" and row_of(text, 1)[-1] == "0%"
    assert row_of(text, 2)[1:4] == ["★", "●", "◇"] and "→ n1 n3" in text
    assert "on the move: 1 of 3 partitions" in text


def test_what_is_not_served_is_said_first() -> None:
    nodes = [node("n1", alive=False), node("n2"), node("n3", draining=True)]
    electing = part(0, "", state="electing", followers=[])
    found = status(electing, part(1, "n2"), nodes=nodes, available=False)
    assert troubles(found)[0] == "not served: jobs/0" and "etcd is away" in troubles(found)[1]
    assert warnings(found) == ["n1 is not there"]
    text = drawn(view_of(found))
    assert "electing" in text and "DOWN" in text and "draining" in text and "AWAY" in text


def test_a_long_list_keeps_those_with_a_story() -> None:
    parts = [part(number) for number in range(100)]
    parts[77] = part(77, followers=[follower("n2", lagging=True, lag=5000), follower("n3")])
    text = drawn(view_of(status(*parts)))
    assert "n2 lagging" in text and f"and {100 - PARTITIONS_SHOWN} more that are fine" in text


def lacks(*parts: dict[str, Any], **of: Any) -> list[str]:
    return unsettled(status(*parts, **of), lag_max=100)


def test_a_cluster_is_settled_when_any_node_may_be_missed() -> None:
    near = part(0, followers=[follower("n2", lag=100), follower("n3")])
    assert lacks(near, part(1, "n3")) == []
    behind = part(0, followers=[follower("n2", lag=101), follower("n3")])
    assert lacks(behind) == ["n2 is 101 entries behind in jobs/0"]
    away = part(0, followers=[follower("n2"), follower("n3", connected=False)])
    assert lacks(away) == ["n3 does not follow jobs/0"]
    assert lacks(part(0, followers=[follower("n2")])) == ["n3 does not follow jobs/0"]
    unheard = part(0, followers=[follower("n2", sequence=0, lag=1), follower("n3")])
    assert lacks(unheard) == ["n2 has acknowledged nothing of jobs/0"]
    other_disk = part(0, followers=[follower("n2", counts=False), follower("n3")])
    assert lacks(other_disk) == ["n2 does not count yet for jobs/0"]


def test_who_has_no_vote_need_not_have_caught_up_and_both_sets_must() -> None:
    learns = [follower("n2", counts=False, lag=9999)]
    learning = part(0, voters=["n1"], learners=["n2"], target=["n2"], followers=learns)
    assert lacks(learning) == []
    joint = part(0, voters=["n1"], joint=["n1", "n2"], followers=[follower("n2", lag=9999)])
    assert lacks(joint) == ["n2 is 9999 entries behind in jobs/0"]


def test_a_node_that_is_gone_or_no_coordinator_is_not_settled() -> None:
    nodes = [node("n1"), node("n2"), node("n3", alive=False)]
    assert lacks(part(0), nodes=nodes) == ["n3 is not there"]
    assert lacks(part(0, voters=["n1", "n2"]), nodes=nodes) == []
    electing = part(0, "", state="electing", followers=[])
    assert lacks(electing) == ["not served: jobs/0"]
    [told] = lacks(part(0), available=False)
    assert "etcd is away" in told


def test_one_topic_alone() -> None:
    found = status(part(0), part(0, topic="other"))
    assert len(of_topic(found, "jobs")["partitions"]) == 1
    with pytest.raises(NotFound):
        of_topic(found, "absent")
    with pytest.raises(NotFound):
        partition_of(found, "jobs", 7)


def test_a_move_is_over_when_the_voters_are_those_wanted() -> None:
    made = [move(number, "n2", "n3") for number in range(4)]
    found = status(
        part(0, voters=["n1", "n2"], target=["n2", "n3"]),
        part(1, voters=["n2", "n3"], joint=["n1", "n2"]),
        part(2, voters=["n2", "n3"], target=["n2", "n3"]),
        part(3, voters=["n3", "n2"]),  # the right nodes, but not the preferred coordinator
    )
    assert [each["partition"] for each in pending(found, made)] == [0, 1, 3]
    assert "n1 n2" in drawn(table_of(made))


class Told:
    """A node that answers with what comes next, and with the last of it from then on."""

    def __init__(self, *statuses: dict[str, Any], waiting: Any = ()) -> None:
        self.statuses, self.waiting, self.looks = list(statuses), waiting, 0

    async def call(self, method: str) -> dict[str, Any]:
        if method == "cluster_moves":
            if isinstance(self.waiting, Exception):
                raise self.waiting
            return {"moves": list(self.waiting)}
        self.looks += 1
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


def move(number: int, *to: str) -> dict[str, Any]:
    return {"topic": "jobs", "partition": number, "from": ["n1", "n2"], "to": list(to)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    monkeypatch.setattr(cluster, "OVERRULED_S", 0.0)


@pytest.mark.usefixtures("quick")
async def test_moves_are_watched_until_they_are_done() -> None:
    here, there = ["n1", "n2"], ["n2", "n3"]
    wanted = [move(0, *there), move(1, *there)]
    told = Told(
        status(part(0, voters=here, target=there), part(1, voters=here)),
        status(part(0, voters=there), part(1, voters=here, joint=there)),
        status(part(0, voters=there)),  # the other one's topic was deleted
        waiting=wanted[1:],
    )
    assert await watch(told, wanted) == (2, [])  # type: ignore[arg-type]
    assert told.looks == 3


@pytest.mark.usefixtures("quick")
async def test_a_move_that_nobody_wants_any_more_is_not_waited_for() -> None:
    here, there = ["n1", "n2"], ["n2", "n3"]
    wanted = [move(0, *there), move(1, *there), move(2, *there)]
    other = status(
        part(0, voters=there),
        part(1, voters=here, target=["n1", "n4"]),  # somebody else's
        part(2, voters=here),  # its plan was replaced
    )
    assert await watch(Told(other), wanted) == (1, wanted[1:])  # type: ignore[arg-type]
    moving = status(part(0, voters=there), part(1, voters=here, target=there), part(2, voters=here))
    told = Told(moving, other)
    assert await watch(told, wanted) == (1, wanted[1:])  # type: ignore[arg-type]
    assert told.looks == 2, "as long as one goes on"


@pytest.mark.usefixtures("quick")
async def test_while_the_plan_cannot_be_read_nothing_is_given_up() -> None:
    here, there = ["n1", "n2"], ["n2", "n3"]
    told = Told(
        status(part(0, voters=here)), status(part(0, voters=there)), waiting=Unavailable("etcd")
    )
    assert await watch(told, [move(0, *there)]) == (1, [])  # type: ignore[arg-type]


def test_progress_is_what_new_replicas_hold() -> None:
    learner = {"voters": ["n1", "n2"], "learners": ["n3"], "target": ["n2", "n3"]}
    streams = part(0, **learner, followers=[follower("n2"), follower("n3", sequence=300)])
    copies = follower("n3", connected=False, sequence=None, copying=500)
    found = status(
        streams,
        part(1, **learner, followers=[follower("n2"), copies]),
        part(2, voters=["n2", "n3"]),
        part(3, voters=["n2", "n1"]),
    )
    made = [move(n, "n2", "n3") for n in range(3)]
    assert copied(found, made) == (300 + 500 + 1200, 3 * 1200)
    assert copied(found, [move(3, "n2", "n1")]) == (0, 0), "another order is no copy"
    assert copied(found, [move(9, "n2", "n3")]) == (0, 0), "its topic is gone"


def test_up_says_where_it_is_and_what_to_try() -> None:
    nodes = [
        {"id": f"n{i}", "pid": 40 + i, "url": f"penstock://127.0.0.1:2000{i}", "http": None}
        for i in (1, 2, 3)
    ]
    document = {"url": "penstock://a,b,c", "etcd": "127.0.0.1:9", "folder": "/x", "nodes": nodes}
    text = drawn(view_of_up(document, kept=False))
    assert "export PENSTOCK_URL=penstock://a,b,c" in text and "kill -9 41" in text
    assert "removed" in text
