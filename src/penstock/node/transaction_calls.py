"""Calls of other nodes about atomic batches. Only the partition's coordinator takes them."""

from __future__ import annotations

from typing import Any

from penstock.errors import InvalidArgument
from penstock.heap.transactions import Place
from penstock.node.calls import Caller, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.preparing import apply_here, decide_here, doubts_here, outcome_here
from penstock.node.topic import Topic


class TransactionArguments(TopicArguments, frozen=True):
    partition: int
    transaction: bytes


class DecisionArguments(TransactionArguments, frozen=True):
    commit: bool


class HomeArguments(DecisionArguments, frozen=True):
    places: tuple[tuple[int, int], ...] = ()  # where the shares are; none: they are not told


class DoubtsArguments(TopicArguments, frozen=True):
    partition: int
    home: int


@method(HomeArguments, between_nodes=True)
async def transaction_decide(engine: Engine, _: Caller, a: HomeArguments) -> dict[str, Any]:
    """Decide in the home partition; the first decision holds and is the answer."""
    topic = engine.queue(a.topic)
    home = topic.here(a.partition)
    places = [_place(topic, *place) for place in a.places]
    return {"commit": await decide_here(topic, home, a.transaction, commit=a.commit, places=places)}


def _place(topic: Topic, partition: int, sequence: int) -> Place:
    if not 0 < sequence < 1 << 63:
        raise InvalidArgument("a share has a sequence from 1 to 2^63 - 1", field="places")
    return Place(topic.partition(partition).index, sequence)


@method(TransactionArguments, between_nodes=True)
async def transaction_outcome(engine: Engine, _: Caller, a: TransactionArguments) -> dict[str, Any]:
    """The home's decision; if there is none, it decides against."""
    topic = engine.queue(a.topic)
    return {"commit": await outcome_here(topic, topic.here(a.partition), a.transaction)}


@method(DecisionArguments, between_nodes=True)
async def transaction_apply(engine: Engine, _: Caller, a: DecisionArguments) -> dict[str, Any]:
    """Follow the home's decision in another partition."""
    topic = engine.queue(a.topic)
    apply_here(topic, topic.here(a.partition), a.transaction, commit=a.commit)
    return {}


@method(DoubtsArguments, between_nodes=True)
async def transaction_doubts(engine: Engine, _: Caller, a: DoubtsArguments) -> dict[str, Any]:
    """Which batches of a home wait for its decision in another partition."""
    topic = engine.queue(a.topic)
    doubts = await doubts_here(topic, topic.here(a.partition), a.home)
    return {"sequence": doubts.sequence, "transactions": sorted(doubts.transactions)}
