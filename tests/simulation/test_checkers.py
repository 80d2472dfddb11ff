"""The checkers on small histories that are wrong in one way each."""

import msgspec
import pytest

from penstock.model.batch import SCHEMAS, Batch, Kind, seal
from penstock.model.columns import Value
from verification.checkers import Checker, Verdict
from verification.events import (
    Atomic,
    AtRest,
    Committed,
    Delivered,
    Enqueued,
    Enqueuing,
    Entered,
    Event,
    Refused,
    Released,
    Settled,
    Stuck,
    digest_of,
)

Made = tuple[Kind, int, dict[str, Value | None], int]


def log(*made: Made, partition: int = 0) -> list[Batch]:
    batches: list[Batch] = []
    for kind, count, values, runs in made:
        batches.append(
            seal(
                kind, SCHEMAS[kind].encode(count, values, runs=runs), topic=1, partition=partition,
                epoch=1, epoch_previous=1 if batches else 0, count=count, time_ms=0,
                first=batches[-1].last + 1 if batches else 1,
                chain_previous=batches[-1].chain if batches else 0,
            )
        )  # fmt: skip
    return batches


def enqueue(sequence: int, kind: Kind = Kind.ENQ, **more: Value | None) -> Made:
    runs = {"run_count": [1], "run_epoch": [1], "run_sequence": [sequence], "run_producer": [b"p"]}
    return kind, 1, {"priority": [0], "payload": [b"body"], **runs, **more}, 1


def lease(message: int) -> Made:
    runs = {"run_count": [1], "run_visibility_ms": [1000], "run_consumer": [b"c"]}
    return Kind.LEASE, 1, {"message": [message], **runs}, 1


def ended(kind: Kind, token: int) -> Made:
    more = {} if kind is Kind.ACK else {"not_before_ms": [0]}
    return kind, 1, {"token": [token], **more}, 0


def verdict(*events: Event, batches: list[Batch] | None = None) -> Verdict:
    """By way of the lines that a cluster would record."""
    checker = Checker()
    checker.read(msgspec.json.encode(event) for event in events)
    checker.add_log(batches or [])
    return checker.verdict()


BODY, OTHER = digest_of(b"body"), digest_of(b"other")
SENT = Enqueuing(0, "p", 1, 1, 1, 0, [BODY])
TOLD = Enqueued(1, "p", 1, 1, 1, 0, 1)


def test_a_good_history_is_good() -> None:
    events = [SENT, TOLD, Delivered(2, "c", 0, 1, 2, 9, BODY), Released(3, 0, 2), Settled(4, 0, 2)]
    found = verdict(*events, batches=log(enqueue(1), lease(1), ended(Kind.ACK, 2)))
    assert found.ok
    assert (found.acknowledged, found.committed, found.leases, found.settled) == (1, 3, 1, 1)


WRONG: dict[str, tuple[str, list[Event], list[Made]]] = {
    "told to be in, and is not": ("acknowledged_lost", [SENT, TOLD], []),
    "another in its place": ("acknowledged_lost", [SENT, TOLD], [enqueue(2)]),
    "never sent": ("phantoms", [], [enqueue(1)]),
    "another body in the log": ("phantoms", [SENT], [enqueue(1, payload=[b"other"])]),
    "no body in the log": ("phantoms", [SENT], [enqueue(1, payload=None)]),
    "another body is delivered": (
        "phantoms",
        [SENT, Delivered(0, "c", 0, 1, 2, 9, OTHER)],
        [enqueue(1), lease(1)],
    ),
    "refused, and in": ("phantoms", [SENT, Refused("p", 1, 1)], [enqueue(1)]),
    "in twice": ("duplicates", [SENT], [enqueue(1), enqueue(1)]),
    "leased while leased": ("double_leases", [SENT], [enqueue(1), lease(1), lease(1)]),
    "held by two": (
        "double_leases",
        [SENT, Delivered(0, "c", 0, 1, 2, 9, BODY), Delivered(5, "d", 0, 1, 4, 20, BODY)],
        [enqueue(1), lease(1), ended(Kind.EXPIRE, 2), lease(1)],
    ),
    "delivered without a lease": ("phantoms", [Delivered(0, "c", 0, 1, 2, 9, BODY)], []),
    "leased when done": ("undone", [SENT], [enqueue(1), lease(1), ended(Kind.ACK, 2), lease(1)]),
    "settled, and not in the log": ("undone", [SENT, Settled(0, 0, 2)], [enqueue(1), lease(1)]),
    "half of an atomic batch": (
        "torn_batches",
        [SENT, Atomic([("p", 1, 1, 1, 0), ("p", 1, 2, 1, 1)])],
        [enqueue(1)],
    ),
    "prepared for ever": (
        "acknowledged_lost",
        [SENT, TOLD],
        [enqueue(1, Kind.PREPARE, transaction=[b"t"], home=[0])],
    ),
    "two in one epoch": ("split_epochs", [Entered(0, 1, "a"), Entered(0, 1, "b")], []),
    "a watermark goes back": (
        "regressions",
        [Committed(0, "a", 1, 5, 50), Committed(0, "a", 1, 4, 40)],
        [],
    ),
    "committed differently": (
        "changed",
        [Committed(0, "a", 1, 5, 50), Committed(0, "b", 1, 5, 51)],
        [],
    ),
    "unequal at rest": ("unequal", [AtRest(0, "a", 5, 50, 1), AtRest(0, "b", 5, 50, 2)], []),
    "stuck": ("stuck", [Stuck("a client waits")], []),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    kind, events, made = WRONG[name]
    found = verdict(*events, batches=log(*made))
    assert getattr(found, kind) >= 1, found
    assert not found.ok
    assert any(problem.startswith(kind) for problem in found.problems)


def test_a_missing_batch_is_a_gap() -> None:
    first, _, third = log(enqueue(1), enqueue(2), enqueue(3))
    assert verdict(batches=[first, third]).gaps == 1


def test_an_aborted_batch_is_not_in_and_may_be_sent_again() -> None:
    prepare = enqueue(1, Kind.PREPARE, transaction=[b"t"], home=[0])
    decide: Made = (Kind.DECIDE, 1, {"transaction": [b"t"], "commit": [0]}, 0)
    found = verdict(SENT, Enqueued(1, "p", 1, 1, 1, 0, 3), batches=log(prepare, decide, enqueue(1)))
    assert found.ok


def test_leases_one_after_the_other_are_fine() -> None:
    deliveries = [Delivered(at, "c", 0, 1, 2 + at, at + 2, None) for at in (0, 2, 4)]
    twice = [lease(1), ended(Kind.EXPIRE, 2), lease(1), ended(Kind.EXPIRE, 4)]
    assert verdict(SENT, *deliveries, batches=log(enqueue(1), *twice, lease(1))).ok
