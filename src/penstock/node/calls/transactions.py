"""Calls of other nodes about atomic batches. Only the partition's coordinator takes them."""

from __future__ import annotations

from penstock.errors import InvalidArgument
from penstock.heap.transactions import SharePlace
from penstock.node.atomic.participant import apply_here, decide_here, doubts_here
from penstock.node.calls.table import Caller, Result, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.serve.topic import Topic, check_id


class OfTopicArguments(TopicArguments, frozen=True, kw_only=True):
    """What names a topic that has the same id at the node that asks."""

    topic_id: int = 0

    def queue(self, engine: Engine) -> Topic:
        topic = engine.queue(self.topic)
        check_id(topic, self.topic_id)
        return topic


class TransactionArguments(OfTopicArguments, frozen=True):
    partition: int
    transaction: bytes


class DecisionArguments(TransactionArguments, frozen=True):
    commit: bool


class HomeArguments(DecisionArguments, frozen=True):
    places: tuple[tuple[int, int], ...] = ()  # where the shares are; none: they are not told


class DoubtsArguments(OfTopicArguments, frozen=True):
    partition: int
    home: int


@method(HomeArguments)
async def transaction_decide(engine: Engine, _: Caller, a: HomeArguments) -> Result:
    """Decide in the home partition; the first decision holds and is the answer."""
    topic = a.queue(engine)
    home = topic.here(a.partition)
    places = [_place(topic, *place) for place in a.places]
    return {"commit": await decide_here(topic, home, a.transaction, commit=a.commit, places=places)}


def _place(topic: Topic, partition: int, sequence: int) -> SharePlace:
    if not 0 < sequence < 1 << 63:
        raise InvalidArgument("a share has a sequence from 1 to 2^63 - 1", field="places")
    return SharePlace(topic.partition(partition).index, sequence)


@method(TransactionArguments)
async def transaction_outcome(engine: Engine, _: Caller, a: TransactionArguments) -> Result:
    """The home's decision; if there is none, it decides against."""
    topic = a.queue(engine)
    home = topic.here(a.partition)
    return {"commit": await decide_here(topic, home, a.transaction, commit=False)}


@method(DecisionArguments)
async def transaction_apply(engine: Engine, _: Caller, a: DecisionArguments) -> Result:
    """Follow the home's decision in another partition."""
    topic = a.queue(engine)
    apply_here(topic, topic.here(a.partition), a.transaction, commit=a.commit)
    return {}


@method(DoubtsArguments)
async def transaction_doubts(engine: Engine, _: Caller, a: DoubtsArguments) -> Result:
    """Which batches of a home wait for its decision in another partition."""
    topic = a.queue(engine)
    doubts = await doubts_here(topic, topic.here(a.partition), a.home)
    return {"sequence": doubts.sequence, "transactions": sorted(doubts.transactions)}
