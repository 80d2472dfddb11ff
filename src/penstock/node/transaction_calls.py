"""Calls of other nodes about atomic batches. Only the partition's coordinator takes them."""

from __future__ import annotations

from typing import Any

from penstock.node.calls import Caller, TopicArguments, method
from penstock.node.engine import Engine
from penstock.node.preparing import apply_here, decide_here, outcome_here


class TransactionArguments(TopicArguments, frozen=True):
    partition: int
    transaction: bytes


class DecisionArguments(TransactionArguments, frozen=True):
    commit: bool


@method(DecisionArguments, between_nodes=True)
async def transaction_decide(engine: Engine, _: Caller, a: DecisionArguments) -> dict[str, Any]:
    """Decide in the home partition; the first decision holds and is the answer."""
    topic = engine.queue(a.topic)
    home = topic.here(a.partition)
    return {"commit": await decide_here(topic, home, a.transaction, commit=a.commit)}


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
