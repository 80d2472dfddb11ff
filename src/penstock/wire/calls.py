"""The administrative calls of the protocol, and what is known of each before it is made.

A client reads here what it may repeat and how long it has to wait, a node what it has to ask of the
caller. What a call does and which arguments it takes is the node's affair.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class CallTraits(NamedTuple):
    """What is known of a call; by default nothing that would make it special."""

    # It may be made twice without harm when the first answer was lost.
    repeatable: bool = False
    # Its work grows with what there is, or it returns when other nodes have done theirs. Only the
    # node knows how long that may be, so its answer is waited for as long as it takes.
    lengthy: bool = False
    # It is answered with messages or vectors, which may be large.
    large: bool = False
    # It needs a confirmation token, which the call `confirm` gives.
    confirmed: bool = False
    # It leaves a line in the audit log.
    audited: bool = False
    # Only another node of the cluster may make it.
    between_nodes: bool = False


_QUESTION: Final = CallTraits(repeatable=True)
_LARGE_QUESTION: Final = CallTraits(repeatable=True, large=True)
_CHANGE: Final = CallTraits(audited=True)
_LENGTHY_CHANGE: Final = CallTraits(lengthy=True, audited=True)
_DESTRUCTION: Final = CallTraits(lengthy=True, confirmed=True, audited=True)
_BETWEEN_NODES: Final = CallTraits(between_nodes=True)

CALLS: Final[dict[str, CallTraits]] = {
    "cluster_drain": _LENGTHY_CHANGE,
    "cluster_moves": CallTraits(),
    "cluster_rebalance": _LENGTHY_CHANGE,
    "cluster_remove_replica": _LENGTHY_CHANGE,
    "cluster_status": _QUESTION,
    "confirm": _QUESTION,
    "cursor_delete": _CHANGE,
    "cursor_list": _QUESTION,
    "dlq_delete": _DESTRUCTION,
    "dlq_list": _LARGE_QUESTION,
    "dlq_replay": _LENGTHY_CHANGE,
    "key_create": _CHANGE,
    "key_list": _QUESTION,
    "key_revoke": CallTraits(confirmed=True, audited=True),
    "live_status": _QUESTION,
    "log_extent": _QUESTION,
    "log_find": _QUESTION,
    "log_status": _QUESTION,
    "move_to_dlq": _CHANGE,
    "node_status": _QUESTION,
    "peek": _LARGE_QUESTION,
    "pop": CallTraits(),
    "producer_begin": _QUESTION,
    "purge": _DESTRUCTION,
    "replica_clock": _BETWEEN_NODES,
    "replica_drain": _BETWEEN_NODES,
    "replica_resign": _BETWEEN_NODES,
    "replica_room": _BETWEEN_NODES,
    "replica_seed": _BETWEEN_NODES,
    "replica_seed_chunk": _BETWEEN_NODES,
    "replica_seed_slice": _BETWEEN_NODES,
    "replica_status": _BETWEEN_NODES,
    "replica_topic": _BETWEEN_NODES,
    "routes": _QUESTION,
    "share": _BETWEEN_NODES,
    "snapshot": _LENGTHY_CHANGE,
    "stats": _QUESTION,
    "topic_create": _LENGTHY_CHANGE,
    "topic_delete": _DESTRUCTION,
    "topic_get": _QUESTION,
    "topic_list": _QUESTION,
    "topic_update": CallTraits(repeatable=True, lengthy=True, audited=True),
    "transaction_apply": _BETWEEN_NODES,
    "transaction_decide": _BETWEEN_NODES,
    "transaction_doubts": _BETWEEN_NODES,
    "transaction_outcome": _BETWEEN_NODES,
    "vector_search": _LARGE_QUESTION,
    "verify": CallTraits(repeatable=True, lengthy=True, audited=True),
}
_UNKNOWN: Final = CallTraits()  # a node refuses what it does not know


def traits_of(method: str) -> CallTraits:
    return CALLS.get(method, _UNKNOWN)


def is_repeatable(method: str, arguments: dict[str, Any]) -> bool:
    """Whether this very call may be made twice. Creating a topic that must be new may not: the
    second answer would be that it exists, which is the one that was just made."""
    if method == "topic_create":
        return bool(arguments.get("exists_ok"))
    return traits_of(method).repeatable
