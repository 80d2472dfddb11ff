"""Penstock: a replicated priority log.

async with penstock.connect() as client:
    jobs = client.topic("jobs", of=dict)
    await jobs.put({"resize": "cat.png"}, priority=5)
    async for message in jobs.consume():
        async with message:
            print(message.value)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.model.version import __version__

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.client.delta.deltas import Deltas
    from penstock.client.delta.fold import Vector
    from penstock.client.delta.subscription import Released, ReleasedBatch
    from penstock.client.network.connection import Connection
    from penstock.client.network.endpoints import Tls
    from penstock.client.options import Options
    from penstock.client.queue.consumer import BatchConsumer, MessageConsumer
    from penstock.client.queue.entries import Item
    from penstock.client.queue.leases import LeasedMessage, MessageBatch
    from penstock.client.queue.log_reader import LogReader
    from penstock.client.queue.messages import DeadLetters, DeadMessage, Message
    from penstock.client.topic import PartitionStats, Topic, TopicStats
    from penstock.errors import (
        AlreadyExists,
        Backpressure,
        BatchAborted,
        CallerError,
        Corruption,
        DiskFull,
        FailedPrecondition,
        Fatal,
        InvalidArgument,
        LeaseLost,
        LimitExceeded,
        NotFound,
        PenstockError,
        QuorumUnavailable,
        RetryableError,
        SequenceConflict,
        SinkRejected,
        StaleProducer,
        StorageFailed,
        Unauthenticated,
        Unavailable,
        Unsupported,
        WorldMoved,
        WrongEpoch,
    )
    from penstock.model.delta import Delta, Op, PriorityClass, Source
    from penstock.model.topic import Compression, Mode, TopicConfig, TopicKind
    from penstock.sinks.index import Index

DATA_FOLDER = "penstock-data"

# Where each public name lives; imported when it is first asked for. The others are errors.
_HOMES = {
    "BatchConsumer": "penstock.client.queue.consumer",
    "Client": "penstock.client.client",
    "Compression": "penstock.model.topic",
    "Connection": "penstock.client.network.connection",
    "DeadLetters": "penstock.client.queue.messages",
    "DeadMessage": "penstock.client.queue.messages",
    "Delta": "penstock.model.delta",
    "Deltas": "penstock.client.delta.deltas",
    "Item": "penstock.client.queue.entries",
    "LeasedMessage": "penstock.client.queue.leases",
    "LogReader": "penstock.client.queue.log_reader",
    "Message": "penstock.client.queue.messages",
    "MessageBatch": "penstock.client.queue.leases",
    "MessageConsumer": "penstock.client.queue.consumer",
    "Mode": "penstock.model.topic",
    "Op": "penstock.model.delta",
    "Options": "penstock.client.options",
    "PartitionStats": "penstock.client.topic",
    "PriorityClass": "penstock.model.delta",
    "Released": "penstock.client.delta.subscription",
    "ReleasedBatch": "penstock.client.delta.subscription",
    "Source": "penstock.model.delta",
    "Topic": "penstock.client.topic",
    "TopicConfig": "penstock.model.topic",
    "TopicKind": "penstock.model.topic",
    "TopicStats": "penstock.client.topic",
    "Vector": "penstock.client.delta.fold",
}

__all__ = [
    "AlreadyExists",
    "Backpressure",
    "BatchAborted",
    "BatchConsumer",
    "CallerError",
    "Client",
    "Compression",
    "Connection",
    "Corruption",
    "DeadLetters",
    "DeadMessage",
    "Delta",
    "Deltas",
    "DiskFull",
    "FailedPrecondition",
    "Fatal",
    "InvalidArgument",
    "Item",
    "LeaseLost",
    "LeasedMessage",
    "LimitExceeded",
    "LogReader",
    "Message",
    "MessageBatch",
    "MessageConsumer",
    "Mode",
    "NotFound",
    "Op",
    "Options",
    "PartitionStats",
    "PenstockError",
    "PriorityClass",
    "QuorumUnavailable",
    "Released",
    "ReleasedBatch",
    "RetryableError",
    "SequenceConflict",
    "SinkRejected",
    "Source",
    "StaleProducer",
    "StorageFailed",
    "Topic",
    "TopicConfig",
    "TopicKind",
    "TopicStats",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Vector",
    "WorldMoved",
    "WrongEpoch",
    "__version__",
    "connect",
    "open_index",
]


def connect(
    url: str | os.PathLike[str] | Sequence[str] | None = None,
    api_key: str | None = None,
    tls: Tls = None,
    *,
    options: Options | None = None,
) -> Client:
    """A client, to be entered with `async with`.

    `url` is `penstock://host:port`, `penstocks://host:port` (TLS), or the path of a folder: then
    the engine runs inside this process, on that folder. Nodes of one cluster stand side by side,
    `penstock://a:7440,b:7440`, or in a list of urls; one that answers is enough. Without it
    PENSTOCK_URL counts, and else the folder `./penstock-data`. `api_key` defaults to
    PENSTOCK_API_KEY.
    """
    from penstock.client.client import Client
    from penstock.client.network.endpoints import Remote
    from penstock.client.options import Options

    key = api_key if api_key is not None else os.environ.get("PENSTOCK_API_KEY") or None
    where: str | Sequence[str] = os.environ.get("PENSTOCK_URL") or DATA_FOLDER
    if url is not None:
        where = os.fspath(url) if isinstance(url, str | os.PathLike) else url
    chosen = options or Options()
    if isinstance(where, str) and "://" not in where:
        from penstock.server.embedded import EmbeddedNode, config_of

        return Client(EmbeddedNode(config_of(where), api_key=key), chosen)
    client = f"penstock-python/{__version__}"
    remote = Remote(where, api_key=key, tls=tls, client=client, codecs=chosen.codecs)
    return Client(remote, chosen)


def open_index(path: str | os.PathLike[str]) -> Index:
    """The nearest-neighbour index that a pipeline's `index` sink keeps in a folder (or at an
    object store's address), to be searched. Needs `penstock[index]`."""
    from penstock.sinks.index import Index

    return Index(os.fspath(path))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "penstock.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
